"""`python -m rollcall.bench growth`: measure submit, status and logs with more and more runs.

For N = 10, 100 and 1,000, it creates N runs, half of them live, and one run on N nodes with four
ranks each. Small scripts replace Slurm's commands. Then it submits a run on N nodes, shows the
table of all runs, and merges the logs of all ranks; the sizes take turns. Everything is in a
temporary directory below runs/. The exit code is 1 if a command's time grows faster than N.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rollcall.bench.startup import measured
from rollcall.installation import command
from rollcall.records.attempt import AttemptEvent, LogSizes
from rollcall.records.job import Submission
from rollcall.records.run import LoggedStep, Verdict
from rollcall.run_dir import RunDir

SIZES = (10, 100, 1000)
RANKS, LINES = 4, 20
"""Ranks per node, and lines per log; each line has a different time."""
COMMANDS = ("submit", "status", "logs --merge")
SLURM = {
    "sbatch": """cat >/dev/null
[ "$1" = --test-only ] && echo "sbatch: Job 1 to start at 2030-01-01T00:00:00 using 1 \
processors on nodes n1 in partition main" >&2 && exit
echo "Submitted batch job $$"
""",
    "sinfo": "echo 'main*|{size}|1-infinite|infinite|up|8|16000|(null)|UNLIMITED'\n",
    "squeue": "cat {place}/queue\n",
    "sacct": "exit 1\n",
    "srun": "exit 1\n",
}
"""Shell lines that replace Slurm's commands."""


class GrowthError(Exception):
    """A command failed; the message is its output."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollcall.bench growth", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--most", type=int, default=SIZES[-1], help=f"of {SIZES}", metavar="N")
    options = parser.parse_args(argv)
    sizes = [size for size in SIZES if size <= options.most]
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    # Not in /tmp, where no run on several nodes may be, nor in a directory that is copied as code.
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
                        print(f"rollcall: error: {error}", file=sys.stderr)
                        return 2
                    seconds.setdefault((name, size), []).append(taken)
    return 0 if _print_table(seconds, sizes) else 1


def _print_table(
    seconds: dict[tuple[str, int], list[tuple[float, float]]], sizes: Sequence[int]
) -> bool:
    """Print medians; return whether no command's time grows faster than the number of runs."""
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
    name = [f"--name=new-{repeat}", f"--root={place}"]
    words = (
        ("submit", f"--nodes={size}", *name),
        ("status", f"--root={place}"),
        ("logs", "wide", "--merge", f"--root={place}"),
    )
    return {key: [*command(*each)] for key, each in zip(COMMANDS, words, strict=True)}


def _measure(command: Sequence[str], place: Path) -> tuple[float, float]:
    start = time.monotonic()
    env = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    answer, cpu = measured(command, env)
    if answer.returncode != 0:
        raise GrowthError(f"{' '.join(command)}: {answer.stdout}")
    return cpu, time.monotonic() - start


def _make(place: Path, size: int) -> None:
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
    run.job.mkdir(parents=True)
    Submission(job, 0.0).append(run.path)
    begun = AttemptEvent(0, job, "started", 1.0, hosts=hosts, ranks=RANKS * len(hosts))
    begun.append(run.path)
    if is_done:
        AttemptEvent(0, job, "ended", 9.0, state="finished").append(run.path)
        Verdict("done", 20, "20 steps trained").write(run.path)
    run.record("first_step", step=1, steps=LINES)
    for step in range(1, LINES + 1):
        LoggedStep(step, 0.5, 1000.0, 2.0 + step).append(run.path)


def _logs(run: RunDir, node: int) -> None:
    folder = run.log(0, node, 0).parent
    folder.mkdir(parents=True)
    ranks = range(RANKS * node, RANKS * (node + 1))
    text = [f"step {number:4}/{LINES}  loss 0.5\n" for number in range(LINES)]
    for rank in ranks:
        run.log(0, node, rank).write_text("".join(text))
    for at in range(LINES):  # one line per second
        sizes = {str(rank): (at + 1) * len(text[0]) for rank in ranks}
        LogSizes(float(at), sizes).append(folder)
