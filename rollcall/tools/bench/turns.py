"""Shared by the benchmarks: ways that take turns, medians, tables and commands that are timed.

A median has its 95 % interval in brackets, from the order of the values alone: David and Nagaraja,
Order Statistics, 2003, section 7.1. It needs six values; of fewer, the brackets have their range.
A ratio is the median of the ratios within each turn.
"""

import argparse
import contextlib
import importlib.metadata
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rollcall.cli.installation import environment
from rollcall.cli.parser import parser as command_parser
from rollcall.messages.text import duration, size, table
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts

BARE = ("-m", "rollcall.tools.bench.bare")
Figures = dict[str, float]
"""The result of one measurement, by the titles of the columns; times are in seconds."""


class BenchError(Exception):
    """Something could not be measured; the message says why."""


def parser(name: str, meaning: str | None, repeats: int = 6) -> argparse.ArgumentParser:
    """Return the parser of a benchmark."""
    made = command_parser(f"bench {name}", meaning)
    words = f"measurements of each kind (default: {repeats})"
    made.add_argument("--repeats", type=count, default=repeats, metavar="N", help=words)
    return made


def count(text: str) -> int:
    """Read a number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not '{text}'")
    return int(text)


def begin(argv: Sequence[str]) -> None:
    """Print the command, the machine with its load, and the versions."""
    print(f"$ rollcall bench {shlex.join(argv)}")
    for name, text in surroundings().items():
        print(f"{name}: {text}")
    print(flush=True)


def surroundings() -> dict[str, str]:
    """Describe the machine with its load, and the versions."""
    memory = size(psutil.virtual_memory().total)
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = ", which is much: compare ratios, not times" * (load > cores / 2)
    parts = [f"{cores} cores ({hosts.processor()})", memory, *_gpus()]
    found = {"Python": platform.python_version()}
    for name in ("rollcall", "torch", "lightning", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    machine = f"{', '.join(parts)}; load {load:.1f}{busy}"
    return {"machine": machine, "versions": ", ".join(map(" ".join, found.items()))}


def _gpus() -> list[str]:
    with contextlib.suppress(OSError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return [line.partition(" (")[0] for line in done.stdout.splitlines() if "GPU" in line]
    return []


def torchrun(*words: str, ranks: int) -> list[str]:
    """Return the command line that starts ranks on this machine with torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *words]


def bare(run: RunDir, *words: int) -> list[str]:
    """Return the command line of a bare script that forks its ranks: its steps, and the ranks."""
    return [sys.executable, *BARE, str(run.path), *map(str, words)]


def take_turns(
    ways: Mapping[str, Callable[[int], Figures]], repeats: int, is_ordered: bool = False
) -> dict[str, list[Figures]]:
    """Call every way with 0, then with 1 and so on, so that other load affects all; show each.

    Every second turn has the opposite order, because a way may be slower after another one.
    """
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in [*ways][:: -1 if number % 2 and not is_ordered else 1]:
            found[name].append(ways[name](number))
            figures = ", ".join(f"{key} {value:.3g}" for key, value in found[name][-1].items())
            print(f"{number + 1} of {repeats}: {name}: {figures}", file=sys.stderr, flush=True)
    return found


def medians(found: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Return the median of each figure of each way."""
    return {
        name: {key: statistics.median(each[key] for each in measured) for key in measured[0]}
        for name, measured in found.items()
    }


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median; the range of fewer than six values."""
    ordered = sorted(values)
    outside, place, number = 0.0, -1, len(ordered)
    while outside <= 0.025 and place < number // 2:
        place += 1
        outside += math.comb(number, place) / 2**number
    return ordered[max(0, place - 1)], ordered[number - 1 - max(0, place - 1)]


def cell(values: Iterable[float], shown: Callable[[float], str] = "{:.2f}".format) -> str:
    """Return a median with its 95 % interval."""
    numbers = list(values)
    low, high = map(shown, interval(numbers))
    own = shown(statistics.median(numbers))
    return own if len(numbers) == 1 else f"{own} [{low}, {high}]"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio within each turn."""
    return [own / other for own, other in zip(values, base, strict=True)]


def column(measured: Sequence[Figures], key: str) -> list[float]:
    """Return one figure of all measurements."""
    return [each[key] for each in measured]


def show(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print(title, *table(rows), sep="\n")


def compare(title: str, of_ways: Mapping[str, Sequence[Figures]], base: str) -> None:
    """Print times, each with its ratio to the way `base`."""
    keys = [*of_ways[base][0]]
    rows = [["", *(text for key in keys for text in (key, f"/ {base}"))]]
    for name, found in of_ways.items():
        own = {key: (column(found, key), column(of_ways[base], key)) for key in keys}
        pairs = [(cell(mine, duration), cell(ratios(mine, by))) for mine, by in own.values()]
        rows.append([name, *(text for pair in pairs for text in pair)])
    show(title, rows)


@contextlib.contextmanager
def started(words: Sequence[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command; at the end, kill what is left of it and of its children."""
    options = {"env": environment(), **options}
    process: subprocess.Popen[str] = subprocess.Popen(words, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            left = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()


def timed(
    words: Sequence[str], first_on_path: Path | None = None, cwd: Path | None = None
) -> Figures:
    """Run a command; return its time, and the CPU time of it and its children.

    Raises:
        BenchError: it failed.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = environment()
    if first_on_path:
        env["PATH"] = os.pathsep.join((str(first_on_path), env["PATH"]))
    output_to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(words, env=env, cwd=cwd, **output_to) as process:
        output, _ = process.communicate()
    taken, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise BenchError(f"exit code {process.returncode}: {' '.join(words)}\n{output}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": taken, "CPU": cpu}


def on_ranks(work: Callable[[], object], folder: Path, ranks: int) -> None:
    """Do some work on every one of a group of new ranks; logs go to the folder.

    Raises:
        BenchError: a rank failed.
    """
    from rollcall.tools.bench import rank_jobs  # here: it takes a while

    os.environ["OMP_NUM_THREADS"] = "1"  # a rank alone would use all cores
    try:
        rank_jobs.on_ranks(work, folder / "logs", ranks, ranks)
    except RuntimeError as error:
        raise BenchError(str(error)) from None
