"""`python -m launch drill RUN WHAT`: do to a live run what will happen to it one day, and measure.

It says first what it is going to do, and asks. The run is meant to go on by itself: it prints after
what time the run's files told of the fault, after what time the run trained again, and how many
steps it then had to do again.

Exit code: 0 the run trains again, 1 it does not, 2 nothing was done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch import runs, slurm, states
from launch.faults import FAULTS, Fault, Target
from launch.runs import NoRunError
from launch.slurm import SlurmError
from train.run import RunDir, read_lines

PATIENCE = 600.0
"""Seconds that a run has to train again."""
ENDED = ("done", "failed", "stopped", "requeue")
BEGIN = 60.0
"""Seconds that a run that has just been submitted has to train."""
LOOK = 0.05
"""Seconds between two looks at the run's files."""
ASK = 1.0
"""Seconds between two questions to Slurm."""


ORDINARY = {"started", "resumed", "first_step", "checkpointed", "evaluated", "finished"}
"""Events that tell of no fault."""


@dataclass
class Measured:
    """What became of a run, in seconds since it was struck; None for what did not happen.

    Attributes:
        noticed: the first word of it in the run's files.
        again: the first step after it.
        lost: steps that had to be done again.
    """

    noticed: float | None = None
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
        target = _find(run)
        fault = FAULTS[options.what](target)
        print(f"{options.what}: {fault.plan}", flush=True)
        if not options.yes and input("Do it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 2
        measured = _measure(target, fault)
    except (NoRunError, SlurmError) as error:
        return runs.refuse("drill", error)
    except EOFError:
        return runs.refuse("drill", "nobody answers here: add --yes")
    print(f"noticed after         {_seconds(measured.noticed)}")
    print(f"training again after  {_seconds(measured.again)}")
    print(f"steps done again      {'?' if measured.lost is None else measured.lost}")
    return 0 if measured.again is not None else 1


def _find(run: RunDir) -> Target:
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


def _measure(target: Target, fault: Fault) -> Measured:
    """Strike, and watch the run's files until it trains again, or has failed."""
    run, found = target.run, Measured()
    known, words = len(_events(run)), _words(run)
    undo = fault.undo
    fault.strike()
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
                return Measured(found.noticed, now, 0)
            furthest = max(furthest, step)
        if "first_step" in names:
            at = next((line["step"] for line in new if line["event"] == "resumed"), 0)
            return Measured(found.noticed, now, max(0, furthest - at))
        verdict = run.read_verdict()
        if verdict is not None and verdict.state in ("done", "failed") and _has_ended(target):
            return found
        if undo is not None and time.monotonic() - asked > ASK:
            asked = time.monotonic()
            if slurm.state(target.job.id) == "PENDING":
                with contextlib.suppress(SlurmError):
                    undo()
                undo = None
        time.sleep(LOOK)
    return found


def _events(run: RunDir) -> list[dict[str, Any]]:
    return list(read_lines(run.events))


def _words(run: RunDir) -> int:
    """How often a supervisor has told of an attempt."""
    return len(list(read_lines(run.job / "attempts.jsonl")))


def _has_ended(target: Target) -> bool:
    return not states.look([target.run])[0][0].is_live
