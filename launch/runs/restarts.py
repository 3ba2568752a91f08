"""Decide whether a run that has come down may start again.

It always may after a preemption, or to use more hosts. Everything else counts: a run that came down
too often without a new checkpoint in between would do so again.
"""

import re
import time
from collections.abc import Sequence

from rollcall.launch.runs import find, reasons
from rollcall.records.attempt import RankFailure
from rollcall.records.files import is_there, listed
from rollcall.records.job import Restart, RestartCause
from rollcall.run_dir import RunDir

HARMLESS = ("preempted", "more hosts")
"""Causes that say nothing about the run; they never count against it."""

MOST = 3
"""After this many times in a row without a new checkpoint, a run has failed."""
PERMANENT = re.compile(
    r"(?P<anywhere>SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError|NameError"
    r"|UnboundLocalError)"
    r"|AssertionError|AttributeError|IndexError|KeyError|NotImplementedError|TypeError|ValueError"
    r"|FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError"
    r"|RuntimeError(?=: .*(shape|size of tensor|sizes|dtype|not implemented for|out of bounds))"
)
"""Exceptions of which every attempt meets the same ones, if the first one met them at its start;
those in `anywhere` are mistakes in the code wherever they occur."""
BAD_HOST = 2
"""After bringing a run down this often, a host is excluded from its job."""


def allowed(run: RunDir, job: str, cause: RestartCause) -> bool:
    """Whether a run that has just come down may start again in this job."""
    if cause in HARMLESS:
        return True
    reached, count, next_cause = _reached(run), 1, cause
    for line in reversed(_lines(run, job)):
        if line.cause not in HARMLESS:
            if line.step != reached:
                break
            # When a node is lost, the ranks on other nodes crash before its absence is noticed.
            count += (line.cause, next_cause) != ("crash", "lost node")
        next_cause = line.cause
    return count < MOST


def is_permanent(run: RunDir, failure: RankFailure | None, is_training: bool) -> bool:
    """Whether every further attempt would meet the same failure, because it is a mistake.

    Of a training, only before any of its attempts has completed a step. Of a script nobody knows
    how far it was; only what is a mistake in its code counts.
    """
    found = PERMANENT.match(failure.error) if failure is not None else None
    if found is None or (is_training and run.read_events("first_step")):
        return False
    return is_training or found["anywhere"] is not None


def note(
    run: RunDir,
    job: str,
    cause: RestartCause,
    hosts: Sequence[str] = (),
    is_queued: bool = False,
) -> None:
    """Record that a run starts again, and the hosts that brought it down where that is known."""
    Restart(time.time(), job, cause, _reached(run), list(hosts), is_queued).append(run.path)


def bad_hosts(run: RunDir, job: str, lost: Sequence[str] = ()) -> list[str]:
    """Return the hosts to exclude from the job: lost, or their ranks killed, BAD_HOST times."""
    # Those in `lost` were lost just now and are not recorded yet.
    blamed = [*lost, *(host for line in _lines(run, job) for host in line.hosts)]
    for attempt in find.attempts(run):
        if attempt.job == job:
            # Only the agent reports a rank that a signal ended; the peers report other errors.
            found = find.failures(run, attempt)
            blamed += {each.host for each in found if reasons.signal_of(each.exit_code)}
    return sorted({host for host in blamed if blamed.count(host) >= BAD_HOST})


def newest(run: RunDir, job: str) -> RestartCause | None:
    """Return what brought the run down before its last restart; None if there was none."""
    return next((line.cause for line in reversed(_lines(run, job))), None)


def saved_step(run: RunDir) -> int:
    """Return the step of the run's newest checkpoint, 0 without one."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in listed(run.checkpoints, "step-*"))
    return max((int(match[1]) for match in names if match), default=0)


def _reached(run: RunDir) -> int:
    """Return the step of the newest checkpoint; for a user's program, how often it has saved."""
    if step := saved_step(run):
        return step
    return 0 if is_there(run.config) else orderly_stops(run)


def orderly_stops(run: RunDir) -> int:
    """Return how often the program of a run ended with the exit code that asks for a restart."""
    return sum(attempt.state == "stopped" for attempt in find.attempts(run))


def _lines(run: RunDir, job: str) -> list[Restart]:
    # Restarts in earlier jobs of the run do not count.
    return [line for line in Restart.read(run.path) if line.job == job]
