"""Print the table of docs/reliability.md: every drill on several labs, 4 ranks on two hosts.

    sudo -E env PYTHONPATH=.:tests/helpers python tests/campaigns/drill_table.py
        [--proctrack cgroup] [--grace 0] [WHAT ...]

Every drill has a separate run in exact mode (drill_row.py). It must end with the weights of
an undisturbed run, which are the same on 4 ranks and on 2.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from checkout import HELPERS, ROOT
from drill_row import ROWS, STEPS, SUBMIT, WORDS, weights
from lab import Lab, running_lab

from rollcall.records.run_dir import RunDir

HEAD = (
    "| drill | proctrack, grace | noticed after | nodes free after | training again after | ranks "
    "| steps repeated | weights |"
)
LINE = "| {} | {}, {} s | {} | {} | {} | {} | {} | {} |"
FOUND = {"PYTHONPATH": f"{ROOT}:{HELPERS}"}
LIMIT = 420
"""Seconds until a row is given up."""


def main() -> None:
    """Start one lab after another, and print a row for every drill."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stop the labs
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proctrack", action="append", choices=("cgroup", "linuxproc"))
    parser.add_argument("--grace", action="append", type=int)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"default: {', '.join(ROWS)}")
    options = parser.parse_args()
    whats = options.what or list(ROWS)
    if unknown := set(whats) - set(ROWS):
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        place = Path(directory)
        expected = {steps: undisturbed(place, steps) for steps in {ROWS[it].steps for it in whats}}
        print(HEAD)
        print("| --- " * HEAD.count(" | ") + "| --- |")
        for proctrack in options.proctrack or ["cgroup", "linuxproc"]:
            for grace in options.grace or [0, 15]:
                words = ["--nodes", "3", "--gpus", "0", "--proctrack", proctrack]
                with running_lab("drills", *words, "--grace", str(grace)) as lab:
                    for number, what in enumerate(whats):
                        run = place / f"{proctrack}-{grace}-{number}"
                        row = drill(lab, run, what, expected[ROWS[what].steps])
                        print(LINE.format(what, proctrack, grace, *row), flush=True)


def undisturbed(place: Path, steps: int) -> str:
    """Return the hash of an undisturbed run's weights.

    Raises:
        AssertionError: the weights on 2 ranks and on 4 ranks differ.
    """
    found = []
    for nodes in (2, 1) if steps == STEPS else (2,):
        run = RunDir(place, f"whole-{steps}-{nodes}")
        options = ["--local", f"--nodes={nodes}", "--wait", "--name", run.name, f"--root={place}"]
        command = [*SUBMIT, *options, *WORDS, f"train.steps={steps}"]
        subprocess.run(command, check=True, capture_output=True)
        found.append(weights(run))
    assert "none" not in found and len(set(found)) == 1, f"{steps} steps on 4 and 2 ranks: {found}"
    return found[0]


def drill(lab: Lab, run: Path, what: str, expected: str) -> list[str]:
    """Return a drill's measurements and whether the weights equal the undisturbed run's."""
    script = str(Path(__file__).with_name("drill_row.py"))
    try:
        done = lab.exec(
            "login", sys.executable, script, lab.name, str(run), what, timeout=LIMIT, env=FOUND
        )
    except subprocess.TimeoutExpired:
        return [f"not finished after {LIMIT} s", "", "", "", "", ""]
    if done.returncode != 0:
        return [done.stderr.strip().splitlines()[-1], "", "", "", "", ""]
    found = json.loads(done.stdout)
    times = [_seconds(found[key]) for key in ("noticed", "free", "again")]
    lost = "" if found["lost"] is None else str(found["lost"])
    return [
        *times,
        str(found["ranks"]),
        lost,
        "equal" if found["weights"] == expected else "DIFFERENT",
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    main()
