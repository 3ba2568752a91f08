"""Shared by the benchmarks: ways that take turns, medians, tables and commands that are timed."""

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rollcall.installation import ROOT
from rollcall.text import table

Figures = dict[str, float]
"""The result of one measurement, by the titles of the columns; times are in seconds."""


class BenchError(Exception):
    """Something could not be measured; the message says why."""


def parser(name: str, meaning: str | None, repeats: int | None = 5) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with `--repeats` unless that is None."""
    made = argparse.ArgumentParser(prog=f"python -m rollcall.bench {name}", description=meaning)
    if repeats is not None:
        words = f"measurements of each kind (default: {repeats})"
        made.add_argument("--repeats", type=int, default=repeats, metavar="N", help=words)
    return made


def torchrun(*words: str, ranks: int) -> list[str]:
    """Return the command line that starts ranks on this machine with torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *words]


def take_turns(
    ways: Mapping[str, Callable[[int], Figures]], repeats: int
) -> dict[str, list[Figures]]:
    """Call every way with 0, then with 1 and so on, so that other load affects all; show each."""
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(repeats):
        for name, way in ways.items():
            found[name].append(way(number))
            figures = ", ".join(f"{key} {value:.3g}" for key, value in found[name][-1].items())
            print(f"{number + 1} of {repeats}: {name}: {figures}", file=sys.stderr, flush=True)
    return found


def medians(found: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Return the median of each figure of each way."""
    return {
        name: {key: statistics.median(each[key] for each in measured) for key in measured[0]}
        for name, measured in found.items()
    }


def seconds(value: float) -> str:
    """Return a time for people."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def show(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print(title, *table(rows), sep="\n")


def compare(title: str, of_ways: Mapping[str, Figures], base: str) -> None:
    """Print times, each with its ratio to the way `base`."""
    rows = [["", *(cell for key in of_ways[base] for cell in (key, f"/ {base}"))]]
    for name, own in of_ways.items():
        ratios = {key: f"{value / of_ways[base][key]:.2f}" for key, value in own.items()}
        rows.append([name, *(cell for key in own for cell in (seconds(own[key]), ratios[key]))])
    show(title, rows)


@contextlib.contextmanager
def started(words: Sequence[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command; at the end, kill what is left of it and of its children."""
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
    path = [str(first_on_path)] if first_on_path else []
    python = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # for another cwd
    env = {"PATH": [*path, os.environ["PATH"]], "PYTHONPATH": python}
    joined = {name: os.pathsep.join(filter(None, places)) for name, places in env.items()}
    output_to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(words, env=os.environ | joined, cwd=cwd, **output_to) as process:
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
    from rollcall.train import matrix  # here: it takes a while

    os.environ["OMP_NUM_THREADS"] = "1"  # a rank alone would use all cores
    try:
        matrix.on_ranks(work, folder / "logs", ranks, ranks)
    except RuntimeError as error:
        raise BenchError(str(error)) from None
