"""`python -m rollcall.bench startup`: measure the time from the command to the first step.

torchrun and the supervisor start the same run in turns, so that other load affects both. With
`--more`, they also take turns with `rollcall submit --local` and with torchrun and a bare script
that trains with DistributedDataParallel. A second table compares the CPU time of `rollcall submit
--dry-run` with the import of submitit.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from rollcall.installation import TRAIN, command
from rollcall.run_dir import RunDir
from rollcall.text import word

SHORT = ("train.steps=1", "checkpoint.every=null")
"""Settings of a run that consists almost entirely of its start."""


class StartupError(Exception):
    """A run ended before its first step."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollcall.bench startup", description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=4, metavar="K")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument(
        "--more", action="store_true", help="also start a bare script, and with submit --local"
    )
    parser.add_argument("words", nargs="*", metavar="[recipe] [key=value ...]")
    options = parser.parse_args(argv)
    ranks = "--nproc-per-node", str(options.nproc_per_node)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ranks]
    starts = {
        "torchrun": [*torchrun, *TRAIN],
        "supervisor": [*command("supervise", *ranks), "--", *TRAIN],
    }
    if options.more:
        starts["submit --local"] = [*command("submit", "--local", "--wait", *ranks), "digits"]
        starts["bare script"] = [*torchrun, "-m", "rollcall.bench.bare_script"]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name, start in starts.items():
                run = RunDir(folder, f"{name}-{repeat}")
                place = [word("run.name", run.name), word("run.root", folder)]
                words = [*start, *options.words, *SHORT, *place]
                try:
                    seconds[name].append(_measure(words, run))
                except StartupError as error:
                    print(f"rollcall: error: {error}", file=sys.stderr)
                    return 1
    _print_table(seconds, options.nproc_per_node)
    _print_dry_run(3 * options.repeats)
    return 0


def _measure(command: Sequence[str], run: RunDir) -> tuple[float, float]:
    start = time.time()
    answer, cpu = measured(command)
    first = [line["time"] for line in run.read_events("first_step")]
    if answer.returncode != 0 or not first:
        raise StartupError(
            f"no first step, exit code {answer.returncode}: {' '.join(command)}\n{answer.stdout}"
        )
    return first[0] - start, cpu


def measured(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; return its result and the CPU seconds of it and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _print_dry_run(repeats: int) -> None:
    commands = {
        "import submitit": [sys.executable, "-c", "import submitit"],
        "submit --dry-run": [*command("submit", "--dry-run")],
    }
    seconds = [[measured(words)[1] for words in commands.values()] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    print(f"\nCPU time of a dry run, medians of {repeats}, in turns")
    for name, median in zip(commands, medians, strict=True):
        print(f"{name:<21}{1000 * median:>6.0f} ms")
    print(f"{'ratio':<21}{medians[1] / medians[0]:>9.2f}")


def _print_table(seconds: dict[str, list[tuple[float, float]]], ranks: int) -> None:
    repeats = len(seconds["torchrun"])
    print(f"command to first step, {ranks} ranks, medians of {repeats}, in turns")
    print(f"{'':<16}{'to first step':>15}{'CPU time':>12}")
    medians = {
        name: [statistics.median(column) for column in zip(*values, strict=True)]
        for name, values in seconds.items()
    }
    for name, (wall, cpu) in medians.items():
        print(f"{name:<16}{wall:>13.2f} s{cpu:>10.2f} s")
    pairs = {"ratio": ("supervisor", "torchrun")}
    if "bare script" in medians:
        pairs |= {f"{name} / bare": (name, "bare script") for name in medians if "bare" not in name}
    for title, (one, other) in pairs.items():
        wall, cpu = (a / b for a, b in zip(medians[one], medians[other], strict=True))
        print(f"{title:<22}{wall:>9.2f}{cpu:>12.2f}")
