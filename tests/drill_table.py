"""Print docs/reliability.md's table: every drill on labs of every kind, 4 ranks on two hosts.

    sudo -E python tests/drill_table.py [--proctrack cgroup] [--grace 0] [WHAT ...]

Every drill has a run of its own in exact mode, which must end with the weights of a run that
nothing befell.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from lab import Lab, running_lab, wait_until

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from launch.faults import FAULTS  # noqa: E402
from train.run import RunDir, read_lines  # noqa: E402

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WORDS = ["digits", "device=cpu", "exact=true", "checkpoint.every=50"]
STEPS = {"time-limit": 3000}
"""How long a run must be for a drill to strike it; others are over within seconds, 400 steps."""
PATTERNS = (r"noticed after +(.*)", r"training again after +(.*)", r"steps done again +(.*)")


def main() -> None:
    """Bring up a lab after the other, and print a row for every drill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proctrack", action="append", choices=("cgroup", "linuxproc"))
    parser.add_argument("--grace", action="append", type=int)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"default: {', '.join(FAULTS)}")
    options = parser.parse_args()
    print("| drill | proctrack, grace | noticed after | again after | steps again | weights |")
    print("| --- | --- | --- | --- | --- | --- |")
    for proctrack in options.proctrack or ["cgroup", "linuxproc"]:
        for grace in options.grace or [0, 15]:
            words = ["--nodes", "2", "--gpus", "0", "--proctrack", proctrack]
            with (
                tempfile.TemporaryDirectory(dir=Path.home()) as place,
                running_lab("drills", *words, "--grace", str(grace)) as lab,
            ):
                expected: dict[int, str] = {}
                for what in options.what or FAULTS:
                    steps = STEPS.get(what, 400)
                    if steps not in expected:
                        expected[steps] = weights(start(lab, Path(place), f"whole-{steps}", steps))
                    row = drill(lab, start(lab, Path(place), what, steps), what, expected[steps])
                    print(f"| {what} | {proctrack}, {grace} s | {' | '.join(row)} |", flush=True)


def start(lab: Lab, place: Path, name: str, steps: int) -> RunDir:
    """Submit a run."""
    options = ["--nodes=2", "--time=10", "--name", name, "--root", str(place)]
    lab.output("login", *SUBMIT, *options, *WORDS, f"train.steps={steps}", timeout=120)
    return RunDir(place, name)


def weights(run: RunDir) -> str:
    """The hash of the weights that a run ends with."""

    def is_over() -> bool:
        verdict = run.read_verdict()
        return bool(_finished(run)) or (verdict is not None and verdict.state == "failed")

    wait_until(is_over, 600, lambda: f"{run.name} does not end")
    return str(next(iter(_finished(run)), "none"))


def _finished(run: RunDir) -> list[object]:
    return [line["weights"] for line in read_lines(run.events) if line.get("state") == "done"]


def drill(lab: Lab, run: RunDir, what: str, expected: str) -> list[str]:
    """A drill's measurements, and whether the weights are those of the undisturbed run."""
    wait_until(lambda: len(list(run.checkpoints.glob("step-*"))) > 1, 120, lambda: "no checkpoints")
    command = [sys.executable, "-m", "launch", "drill", str(run.path), what, "--yes"]
    done = lab.exec("login", *command, timeout=600, cwd=ROOT)
    if done.returncode == 2:
        return [done.stderr.strip(), "", "", ""]
    found = [re.findall(pattern, done.stdout) for pattern in PATTERNS]
    same = "equal" if weights(run) == expected else "DIFFERENT"
    return [*(match[0] if match else "?" for match in found), same]


if __name__ == "__main__":
    main()
