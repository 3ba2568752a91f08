"""`python -m launch startup`: how long does it take from the command to the first step?

Plain torchrun and the supervisor start the same run in turns, so that whatever else the machine
does falls on both; the table shows medians. A second table compares the CPU time of a dry run of
submit.py with that of importing submitit alone.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.words import word
from train.run import RunDir, read_lines

SHORT = ("train.steps=1", "checkpoint.every=null")
"""What makes a run so short that its start is nearly all of it."""


class StartupError(Exception):
    """A run ended before its first step."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch startup", description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=4, metavar="K")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("words", nargs="*", metavar="[recipe] [key=value ...]")
    options = parser.parse_args(argv)
    python = [sys.executable, "-m"]
    ranks = str(options.nproc_per_node)
    starts = {
        "torchrun": [*python, "torch.distributed.run", "--nproc-per-node", ranks],
        "supervisor": [*python, "launch", "supervise", "--nproc-per-node", ranks, "--"],
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name, start in starts.items():
                run = RunDir(folder, f"{name}-{repeat}")
                place = [word("run.name", run.name), word("run.root", folder)]
                command = [*start, "-m", "train", *options.words, *SHORT, *place]
                try:
                    seconds[name].append(_measure(command, run))
                except StartupError as error:
                    print(f"startup: error: {error}", file=sys.stderr)
                    return 1
    _print_table(seconds, options.nproc_per_node)
    _print_dry_run(3 * options.repeats)
    return 0


def _measure(command: Sequence[str], run: RunDir) -> tuple[float, float]:
    """Seconds of the clock until the first step, and of CPU for the whole command."""
    start = time.time()
    answer, cpu = measured(command)
    first = [line["time"] for line in read_lines(run.events) if line["event"] == "first_step"]
    if answer.returncode != 0 or not first:
        raise StartupError(
            f"no first step, exit code {answer.returncode}: {' '.join(command)}\n{answer.stdout}"
        )
    return first[0] - start, cpu


def measured(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished command, and the seconds of CPU that it and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _print_dry_run(repeats: int) -> None:
    submit = str(Path(__file__).with_name("submit.py"))
    commands = {
        "import submitit": [sys.executable, "-c", "import submitit"],
        "submit.py --dry-run": [sys.executable, submit, "--dry-run"],
    }
    seconds = [[measured(command)[1] for command in commands.values()] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    print(f"\nCPU time of a dry run, medians of {repeats}, in turns")
    for name, median in zip(commands, medians, strict=True):
        print(f"{name:<21}{1000 * median:>6.0f} ms")
    print(f"{'ratio':<21}{medians[1] / medians[0]:>9.2f}")


def _print_table(seconds: dict[str, list[tuple[float, float]]], ranks: int) -> None:
    repeats = len(seconds["torchrun"])
    print(f"command to first step, {ranks} ranks, medians of {repeats}, in turns")
    print(f"{'':<12}{'to first step':>15}{'CPU time':>12}")
    medians = {
        name: [statistics.median(column) for column in zip(*values, strict=True)]
        for name, values in seconds.items()
    }
    for name, (wall, cpu) in medians.items():
        print(f"{name:<12}{wall:>13.2f} s{cpu:>10.2f} s")
    ratios = [own / plain for own, plain in zip(*reversed(medians.values()), strict=True)]
    print(f"{'ratio':<12}{ratios[0]:>15.2f}{ratios[1]:>12.2f}")
