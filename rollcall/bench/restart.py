"""`python -m rollcall.bench restart`: measure the time from a killed rank to the next first step.

The supervisor and torchrun take turns, so that other load affects both. Each runs the same training
on two ranks, of which one is killed after the first steps.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rollcall.installation import TRAIN, command
from rollcall.run_dir import RunDir
from rollcall.text import table, word

WORDS = ("digits", "device=cpu", "train.steps=1000000", "checkpoint.every=20", "log.every=1000")
STEPS_BEFORE = 2.0
"""Seconds of training before the rank is killed, so that there is a checkpoint."""
TIMEOUT = 60.0
"""Seconds after which a first step is no longer expected."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollcall.bench restart", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    options = parser.parse_args(argv)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    starts = {
        "torchrun": [*torchrun, "--max-restarts=3"],
        "supervisor": [*command("supervise", "--nproc-per-node", "2"), "--"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name, start in starts.items():
                run = RunDir(folder, f"{name}-{repeat}")
                place = [word("run.name", run.name), word("run.root", folder)]
                taken = _measure([*start, *TRAIN, *WORDS, *place], run)
                seconds[name] += [] if taken is None else [taken]
    print("killed rank to first step, 2 ranks, medians of those that restarted, in turns")
    rows = [("", "to first step", "restarted")]
    for name, found in seconds.items():
        median = f"{statistics.median(found):.2f} s" if found else "never"
        rows.append((name, median, f"{len(found)} of {options.repeats}"))
    print("\n".join(table(rows)))
    return 0 if seconds["supervisor"] else 1


def _measure(words: Sequence[str], run: RunDir) -> float | None:
    """Start a training, kill rank 1, and return the seconds until the next first step, if any."""
    launcher = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if not _first_step(run, 1, launcher):
            return None
        time.sleep(STEPS_BEFORE)
        killed = time.time()
        os.kill(_rank(launcher.pid, 1), signal.SIGKILL)
        again = _first_step(run, 2, launcher)
        return again - killed if again else None
    finally:
        left = psutil.Process(launcher.pid).children(recursive=True) if _runs(launcher) else []
        launcher.kill()
        for process in left:
            if process.is_running():
                process.kill()
        launcher.wait()


def _first_step(run: RunDir, number: int, launcher: subprocess.Popen[bytes]) -> float | None:
    """Wait for the first step of the attempt with this number; return its time."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end and _runs(launcher):
        times = [float(line["time"]) for line in run.read_events("first_step")]
        if len(times) >= number:
            return times[number - 1]
        time.sleep(0.02)
    return None


def _runs(launcher: subprocess.Popen[bytes]) -> bool:
    return launcher.poll() is None


def _rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank: the one that writes its log, or has RANK from torchrun."""
    for process in psutil.Process(launcher).children(recursive=True):
        output = Path(f"/proc/{process.pid}/fd/1")
        forked = output.exists() and output.resolve().name == f"rank-{rank}.log"
        if forked or process.environ().get("RANK") == str(rank):
            return process.pid
    raise LookupError(f"no process of {launcher} is rank {rank}")
