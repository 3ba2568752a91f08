"""`python -m launch growth`: how do submit, status and logs grow with what is recorded?

For 10, 100 and 1,000 it makes up as many runs in one place, half of them live, and one run of as
many nodes with four ranks each. Small scripts stand for Slurm's commands. Then it submits a run of
so many nodes, shows the table of all runs and merges the logs of all ranks, each in a process of
its own and the sizes in turns. All of it lies in a directory below runs/, which goes at the end.
Exit code 1 if anything grows faster than what is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.startup import measured
from train.run import RunDir

SIZES = (10, 100, 1000)
RANKS, LINES = 4, 20
"""Ranks of a node, and lines of a rank's log, each with a time of its own."""
COMMANDS = ("submit", "status", "logs --merge")
SUBMIT = Path(__file__).with_name("submit.py")
SLURM = {
    "sbatch": """cat >/dev/null
[ "$1" = --test-only ] && echo "sbatch: Job 1 to start at 2030-01-01T00:00:00 using 1 \
processors on nodes n1 in partition main" >&2 && exit
echo "Submitted batch job $$"
""",
    "sinfo": "echo 'main*|{size}|1-infinite|infinite|up|8|16000|(null)'\n",
    "squeue": "cat {place}/queue\n",
    "sacct": "exit 1\n",
    "srun": "exit 1\n",
}
"""What stands for Slurm's commands, as shell lines."""


class GrowthError(Exception):
    """A command failed; the message is its own."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch growth", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--most", type=int, default=SIZES[-1], help=f"of {SIZES}", metavar="N")
    options = parser.parse_args(argv)
    sizes = [size for size in SIZES if size <= options.most]
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    # Not in /tmp, where submit.py lets no run of several nodes be, nor where code is copied from.
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".growth-", dir=runs) as folder:
        for size in sizes:
            _make(Path(folder, str(size)), size)
        for repeat in range(options.repeats):
            for size in sizes:
                place = Path(folder, str(size))
                for name, command in _commands(place, size, repeat).items():
                    try:
                        taken = _measure(command, place)
                    except GrowthError as error:
                        print(f"growth: error: {error}", file=sys.stderr)
                        return 2
                    seconds.setdefault((name, size), []).append(taken)
    return 0 if _print_table(seconds, sizes) else 1


def _print_table(
    seconds: dict[tuple[str, int], list[tuple[float, float]]], sizes: Sequence[int]
) -> bool:
    """Print medians; whether nothing grows faster than what is recorded."""
    repeats = len(seconds[COMMANDS[0], sizes[0]])
    is_linear = True
    print(f"medians of {repeats}, in turns")
    print(f"{'':<14}{'nodes, runs':>12}{'CPU':>11}{'clock':>11}{'CPU, as a multiple':>20}")
    for name in COMMANDS:
        first = 0.0
        for size in sizes:
            cpu, clock = (statistics.median(c) for c in zip(*seconds[name, size], strict=True))
            first = first or cpu
            is_linear &= cpu / first <= size / sizes[0]
            row = f"{name:<14}{size:>12,}{1000 * cpu:>8.0f} ms{1000 * clock:>8.0f} ms"
            print(f"{row}{cpu / first:>20.1f}")
    return is_linear


def _commands(place: Path, size: int, repeat: int) -> dict[str, list[str]]:
    launch = [sys.executable, "-m", "launch"]
    name = [f"--name=new-{repeat}", f"--root={place}"]
    return {
        "submit": [sys.executable, str(SUBMIT), f"--nodes={size}", *name],
        "status": [*launch, "status", f"--root={place}"],
        "logs --merge": [*launch, "logs", "wide", "--merge", f"--root={place}"],
    }


def _measure(command: Sequence[str], place: Path) -> tuple[float, float]:
    """Seconds of CPU, and of the clock."""
    start = time.monotonic()
    env = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    answer, cpu = measured(command, env)
    if answer.returncode != 0:
        raise GrowthError(f"{' '.join(command)}: {answer.stdout}")
    return cpu, time.monotonic() - start


def _make(place: Path, size: int) -> None:
    """Make up what is recorded: `size` runs, and one of `size` nodes."""
    (place / "bin").mkdir(parents=True)
    for name, text in SLURM.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{text.format(size=size, place=place)}")
        (place / "bin" / name).chmod(0o755)
    for number in range(size):
        _run(RunDir(place, f"run-{number}"), str(number + 1), ["n1", "n2"], is_done=number % 2 == 0)
    live = range(2, size + 1, 2)
    rows = [f"{job}|{job}|RUNNING|None|2030-01-01T00:00:00|2" for job in live]
    (place / "queue").write_text("\n".join(rows) + "\n")
    wide = RunDir(place, "wide")
    _run(wide, str(size + 1), [f"n{number}" for number in range(size)], is_done=True)
    for node in range(size):
        _logs(wide, node)


def _run(run: RunDir, job: str, hosts: list[str], is_done: bool) -> None:
    """A run with what its supervisors and rank 0 write."""
    run.job.mkdir(parents=True)
    started = {"attempt": 0, "job": job, "event": "started", "hosts": hosts, "time": 1.0}
    lines = [{**started, "ranks": RANKS * len(hosts)}]
    if is_done:
        lines.append({"attempt": 0, "job": job, "event": "ended", "state": "finished", "time": 9.0})
        run.verdict.write_text('{"state": "done", "step": 20, "reason": "20 steps trained"}\n')
    steps = [
        {"step": step, "loss": 0.5, "samples_per_second": 1000.0, "time": 2.0 + step}
        for step in range(1, LINES + 1)
    ]
    files: dict[Path, list[dict[str, Any]]] = {
        run.job / "submissions.jsonl": [{"job": job, "time": 0.0}],
        run.job / "attempts.jsonl": lines,
        run.events: [{"event": "first_step", "time": 3.0, "step": 1, "steps": LINES}],
        run.metrics: steps,
    }
    for path, objects in files.items():
        path.write_text("".join(json.dumps(line) + "\n" for line in objects))


def _logs(run: RunDir, node: int) -> None:
    """The logs of a node, all of which grow by a line every second."""
    folder = run.log(0, node, 0).parent
    folder.mkdir(parents=True)
    ranks = range(RANKS * node, RANKS * (node + 1))
    text = [f"step {number:4}/{LINES}  loss 0.5\n" for number in range(LINES)]
    for rank in ranks:
        run.log(0, node, rank).write_text("".join(text))
    sizes = [{str(rank): (at + 1) * len(text[0]) for rank in ranks} for at in range(LINES)]
    lines = [{"time": float(at), "sizes": size} for at, size in enumerate(sizes)]
    (folder / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
