"""`rollcall drill RUN WHAT`: inject a fault into a live run, and measure the recovery.

The command first says what it is going to do, and asks. The run should recover without help. It
prints how long it took until the run's files showed the fault, its nodes were free again (if it
lost them) and it trained again, and how many steps it had to repeat.

Exit code: 0 if the run trains again, 1 if it does not, 2 if nothing was done.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.messages.refusal import RefusedError
from rollcall.records.attempt import AttemptEvent
from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.system.timer import Every
from rollcall.tools.drill.faults import FAULTS, Fault, Target

PATIENCE = 600.0
"""Seconds within which a run must train again."""
ENDED = ("done", "failed", "stopped", "requeue")
"""States in which a run will not train."""
START_TIMEOUT = 60.0
"""Seconds within which a run that was just submitted must start to train."""
FILE_INTERVAL = 0.05
"""Seconds between two reads of the run's files."""
QUERY_INTERVAL = 0.5
"""Seconds between two queries to Slurm."""
ORDINARY = {"started", "resumed", "first_step", "checkpointed", "evaluated", "finished"}
"""Events that are not signs of a fault."""


@dataclass
class Recovery:
    """A recovery, in seconds since the fault; None for what did not happen."""

    noticed: float | None = None  # when the run's files first showed the fault
    free: float | None = None  # when the run's nodes were free again
    again: float | None = None  # when the run made its first step after the fault
    lost: int | None = None  # steps that had to be repeated


def main(argv: Sequence[str]) -> int:
    """Ask, inject the fault, watch the run and print the recovery; return the exit code."""
    parser = find.parser("drill", __doc__)
    parser.add_argument("what", choices=FAULTS, metavar="WHAT", help=", ".join(FAULTS))
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(argv)
    target = await_training(find.find(options.run, options.root))
    fault = FAULTS[options.what](target)
    print(f"{options.what}: {fault.plan}", flush=True)
    try:
        if not options.yes and input("Do it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 2
    except EOFError:
        raise RefusedError("cannot ask for confirmation here: add --yes") from None
    recovery = measure(target, fault)
    print(f"noticed after         {_seconds(recovery.noticed)}")
    if fault.is_free is not None:
        print(f"nodes free after      {_seconds(recovery.free)}")
    print(f"training again after  {_seconds(recovery.again)}")
    print(f"steps done again      {'?' if recovery.lost is None else recovery.lost}")
    return 0 if recovery.again is not None else 1


def await_training(run: RunDir) -> Target:
    """Wait until the run trains; return its current attempt. Raise NoRunError if it does not."""
    end = time.monotonic() + START_TIMEOUT
    while True:
        with contextlib.suppress(NoRunError):
            target = Target(run, *states.live_attempt(run))
            names = [line["event"] for line in run.read_events()][::-1]
            if "first_step" in names[: [*names, "started"].index("started")]:
                return target
        state = states.look([run])[0][0].state
        if state in ENDED or time.monotonic() > end:
            raise NoRunError(f"run {run.name} is not training: {state}; see rollcall status")
        time.sleep(QUERY_INTERVAL)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def measure(target: Target, fault: Fault) -> Recovery:
    """Inject the fault, or raise SlurmError; watch the run until it trains again or has ended."""
    recovery = Recovery()
    events, starts = len(target.run.read_events()), len(AttemptEvent.read(target.run.path))
    # A Ctrl-C must not leave the fault half done, such as a disk that stays full.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        fault.inject()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        _watch(target.run, fault, recovery, events, starts)
    finally:
        if fault.undo is not None and recovery.free is None:
            try:
                fault.undo()
            except SlurmError as error:
                warning = f"could not undo this, because {error}: {fault.plan}"
                print(f"rollcall: warning: {warning}", file=sys.stderr)
    return recovery


def _watch(run: RunDir, fault: Fault, recovery: Recovery, events: int, starts: int) -> None:
    """Fill in `recovery` until the run trains again or has ended; skip the older events."""
    start, ask = time.monotonic(), Every(QUERY_INTERVAL, at_once=False)
    furthest = 0
    while time.monotonic() - start < PATIENCE:
        now = time.monotonic() - start
        new = run.read_events()[events:]
        names = [line["event"] for line in new]
        if recovery.noticed is None:
            shows = set(names) - ORDINARY or len(AttemptEvent.read(run.path)) > starts
            recovery.noticed = now if shows else None
        if "resumed" not in names:
            newest = LoggedStep.newest(run.path)
            step = newest.step if newest else 0
            if fault.is_endured and 0 < furthest < step:
                recovery.again, recovery.lost = now, 0
                return
            furthest = max(furthest, step)
        if "first_step" in names:
            at = next((line["step"] for line in new if line["event"] == "resumed"), 0)
            recovery.again, recovery.lost = now, max(0, furthest - at)
            return
        if ask.is_due() and not _may_recover(run, fault, recovery, now):
            return
        time.sleep(FILE_INTERVAL)


def _may_recover(run: RunDir, fault: Fault, recovery: Recovery, now: float) -> bool:
    # First, because the nodes of an ended run may be free.
    (condition,), complaint = states.look([run])
    with contextlib.suppress(SlurmError):  # it may answer the next time
        if fault.is_free is not None and recovery.free is None and fault.is_free():
            if fault.undo is not None:
                fault.undo()
            recovery.free = now
            return True
    return condition.is_live or bool(complaint)
