"""`rollcall bench restart`: measure the time from a killed rank to the next first step.

The supervisor and torchrun take turns, so that other load affects both. Each runs the same training
on two ranks, of which one is killed after the first steps. torchrun does not always restart. The
floor is a bare script whose ranks are forked again (rollcall/tools/bench/bare.py).
"""

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from rollcall.cli.installation import TRAIN, command
from rollcall.messages.text import duration
from rollcall.records.run_dir import RunDir
from rollcall.tools.bench import turns

WORDS = ("digits", "device=cpu", "train.steps=1000000", "checkpoint.every=20", "log.every=1000")
STEPS_BEFORE = 1.0
"""Seconds of training before the rank is killed, so that there is a checkpoint."""
TIMEOUT = 120.0
"""Seconds after which the first step of a start is no longer expected."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    words = turns.parser("restart", __doc__)
    words.add_argument(
        "--limit", type=float, default=20.0, metavar="S", help="for the next step (default: 20 s)"
    )
    options = words.parse_args(argv)
    supervise = command("supervise", "--nproc-per-node", "2")
    trained = (*TRAIN, *WORDS)
    torchrun = turns.torchrun("--max-restarts=3", *trained, ranks=2)
    starts: dict[str, Callable[[RunDir], list[str]]] = {
        "torchrun": lambda run: [*torchrun, *run.words],
        "supervisor": lambda run: [*supervise, "--", *trained, *run.words],
        "bare script, forked": lambda run: turns.bare(run, 10**9, 2),
    }
    with tempfile.TemporaryDirectory() as folder:

        def measure(name: str, number: int) -> turns.Figures:
            run = RunDir(folder, f"{name}-{number}")
            return {"to first step": _measure(starts[name](run), run, options.limit)}

        found = turns.take_turns({name: partial(measure, name) for name in starts}, options.repeats)
    restarts = {
        name: [*filter(math.isfinite, turns.column(figures, "to first step"))]
        for name, figures in found.items()
    }
    rows = [("", "to first step", f"restarted within {options.limit:g} s")]
    for name, known in restarts.items():
        shown = turns.cell(known, duration) if known else "never"
        rows.append((name, shown, f"{len(known)} of {options.repeats}"))
    turns.show("killed rank to first step, 2 ranks, medians of the restarts, in turns", rows)
    return 0 if restarts["supervisor"] else 1


def _measure(words: Sequence[str], run: RunDir, limit: float) -> float:
    """Start a training, kill rank 1, and return the seconds until the next first step."""
    log = run.path.with_suffix(".log")
    with (
        log.open("w") as output,
        turns.started(words, stdout=output, stderr=subprocess.STDOUT) as launcher,
    ):
        if math.isinf(_first_step(run, 1, launcher, TIMEOUT)):
            raise turns.BenchError(f"no first step: {' '.join(words)}\n{log.read_text()}")
        time.sleep(STEPS_BEFORE)
        killed = time.time()
        os.kill(_rank(launcher.pid, 1), signal.SIGKILL)
        return _first_step(run, 2, launcher, limit) - killed


def _first_step(run: RunDir, number: int, launcher: subprocess.Popen[str], limit: float) -> float:
    """Wait for the first step of the attempt with this number; return its time."""
    end = time.monotonic() + limit
    while time.monotonic() < end and launcher.poll() is None:
        times = [float(line["time"]) for line in run.read_events("first_step")]
        if len(times) >= number:
            return times[number - 1]
        time.sleep(0.02)
    return math.inf


def _rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank: the one that writes its log, or has RANK from torchrun."""
    for process in psutil.Process(launcher).children(recursive=True):
        output = Path(f"/proc/{process.pid}/fd/1")
        forked = output.exists() and output.resolve().name == f"rank-{rank}.log"
        if forked or process.environ().get("RANK") == str(rank):
            return process.pid
    raise LookupError(f"no process of {launcher} is rank {rank}")
