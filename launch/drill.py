"""`python -m launch drill RUN WHAT`: do to a live run what will happen to it one day, and measure.

It says first what it is going to do, and asks. The run is meant to go on by itself: it prints after
what time the run's files told of the fault, after what time the run could have its nodes again (if
it lost them), after what time it trained again, and how many steps it then had to do again.

Exit code: 0 the run trains again, 1 it does not, 2 nothing was done.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch import runs, states
from launch.faults import FAULTS, Fault, Target
from launch.runs import NoRunError
from launch.slurm import SlurmError
from train.run import RunDir, read_lines

PATIENCE = 600.0
"""Seconds that a run has to train again."""
ENDED = ("done", "failed", "stopped", "requeue")
"""States from which a run does not come to train."""
BEGIN = 60.0
"""Seconds that a run that has just been submitted has to train."""
LOOK = 0.05
"""Seconds between two looks at the run's files."""
ASK = 0.5
"""Seconds between two questions to Slurm."""
ORDINARY = {"started", "resumed", "first_step", "checkpointed", "evaluated", "finished"}
"""Events that tell of no fault."""


@dataclass
class Measured:
    """What became of a run, in seconds since it was struck; None for what did not happen.

    Attributes:
        noticed: the first word of it in the run's files.
        free: the run could have its nodes again.
        again: the first step after it.
        lost: steps that had to be done again.
    """

    noticed: float | None = None
    free: float | None = None
    again: float | None = None
    lost: int | None = None


def main(argv: Sequence[str]) -> int:
    """Ask, strike, watch and print; return the exit code."""
    parser = runs.parser("drill", __doc__)
    parser.add_argument("what", choices=FAULTS, metavar="WHAT", help=", ".join(FAULTS))
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        target = await_training(run)
        fault = FAULTS[options.what](target)
        print(f"{options.what}: {fault.plan}", flush=True)
        if not options.yes and input("Do it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 2
        measured = measure(target, fault)
    except (NoRunError, SlurmError) as error:
        return runs.refuse("drill", error)
    except EOFError:
        return runs.refuse("drill", "nobody answers here: add --yes")
    print(f"noticed after         {_seconds(measured.noticed)}")
    if fault.is_free is not None:
        print(f"nodes free after      {_seconds(measured.free)}")
    print(f"training again after  {_seconds(measured.again)}")
    print(f"steps done again      {'?' if measured.lost is None else measured.lost}")
    return 0 if measured.again is not None else 1


def await_training(run: RunDir) -> Target:
    """The run's present attempt, once it trains.

    Raises:
        NoRunError: the run is not live, or does not come to train.
    """
    end = time.monotonic() + BEGIN
    while True:
        with contextlib.suppress(NoRunError):
            target = Target(run, *states.live_attempt(run))
            names = [line["event"] for line in _events(run)]
            if "first_step" in names[::-1][: [*names[::-1], "started"].index("started")]:
                return target
        state = states.look([run])[0][0].state
        if state in ENDED or time.monotonic() > end:
            raise NoRunError(f"run {run.name} does not train: {state}")
        time.sleep(ASK)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def measure(target: Target, fault: Fault) -> Measured:
    """Strike, and watch the run's files until it trains again, or has ended.

    Raises:
        SlurmError: the fault does not come about.
    """
    found = Measured()
    known, words = len(_events(target.run)), _words(target.run)
    # A Ctrl-C must not leave half of it: a disk that stays full.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        fault.strike()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        _watch(target.run, fault, found, known, words)
    finally:
        if fault.undo is not None and found.free is None:
            _take_back(fault.plan, fault.undo)
    return found


def _take_back(plan: str, undo: Callable[[], object]) -> None:
    try:
        undo()
    except SlurmError as error:
        print(f"drill: note: this stays, since {error}: {plan}", file=sys.stderr)


def _watch(run: RunDir, fault: Fault, found: Measured, known: int, words: int) -> None:
    """Measure, until the run trains again or has ended.

    Args:
        run: the run.
        fault: what it has been struck with.
        found: gets what is measured.
        known: how many events there were before.
        words: how often supervisors had told of attempts.
    """
    start = asked = time.monotonic()
    furthest = 0
    while time.monotonic() - start < PATIENCE:
        now = time.monotonic() - start
        new = _events(run)[known:]
        names = [line["event"] for line in new]
        if found.noticed is None and (_words(run) > words or set(names) - ORDINARY):
            found.noticed = now
        if "resumed" not in names:
            step = max([0, *(line["step"] for line in runs.last_lines(run.metrics))])
            if fault.is_endured and 0 < furthest < step:
                found.again, found.lost = now, 0
                return
            furthest = max(furthest, step)
        if "first_step" in names:
            at = next((line["step"] for line in new if line["event"] == "resumed"), 0)
            found.again, found.lost = now, max(0, furthest - at)
            return
        if time.monotonic() - asked > ASK:
            asked = time.monotonic()
            if not _may_go_on(run, fault, found, now):
                return
        time.sleep(LOOK)


def _may_go_on(run: RunDir, fault: Fault, found: Measured, now: float) -> bool:
    """Ask Slurm whether the nodes are free, and whether the run may still come back."""
    (condition,), complaint = states.look([run])  # first: a run that has ended may be free then
    with contextlib.suppress(SlurmError):  # it answers later
        if fault.is_free is not None and found.free is None and fault.is_free():
            if fault.undo is not None:
                fault.undo()
            found.free = now
            return True
    return condition.is_live or bool(complaint)


def _events(run: RunDir) -> list[dict[str, Any]]:
    return list(read_lines(run.events))


def _words(run: RunDir) -> int:
    """How often a supervisor has told of an attempt."""
    return len(list(read_lines(run.job / "attempts.jsonl")))
