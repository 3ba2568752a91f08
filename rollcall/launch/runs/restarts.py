"""The records of a run that decide whether it may start again; see `decision`."""

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from rollcall.launch.runs import decision, find, reasons
from rollcall.records.attempt import RankFailure
from rollcall.records.job import Restart, RestartCause
from rollcall.records.run import INTEGER_LIMIT, ForgottenStep
from rollcall.records.run_dir import RunDir
from rollcall.system.files import is_there, listed

MAX_REASON = 500
"""Most characters of a reason that are recorded: an exception may print a whole tensor."""


def in_vain(run: RunDir, job: str, cause: RestartCause) -> bool:
    """Return True if a run that has just come down did so too often in this job."""
    return decision.is_in_vain(_lines(run, job), _reached(run), cause)


def is_permanent(run: RunDir, failure: RankFailure | None, trains: bool) -> bool:
    """Return True if every further attempt would meet the same failure."""
    has_stepped = trains and bool(run.read_events("first_step"))
    return failure is not None and decision.is_permanent(failure.error, trains, has_stepped)


def note(
    run: RunDir,
    job: str,
    cause: RestartCause,
    hosts: Sequence[str] = (),
    is_queued: bool = False,
    reason: str = "",
) -> None:
    """Record that a run starts again, and the hosts and the first cause where they are known."""
    reason = "".join(reason.splitlines()[:1])[:MAX_REASON]
    line = Restart(time.time(), job, cause, _reached(run), list(hosts), is_queued, reason)
    with contextlib.suppress(OSError):  # a full disk must not end a run
        line.append(run.path)


def history(run: RunDir) -> list[str]:
    """Return a line about each restart of a run, in order: the step, and why."""
    known = Restart.read(run.path)
    return [f"from step {line.step}: {line}" if line.step else str(line) for line in known]


@dataclass(frozen=True)
class Rollback:
    """A return of a run to a checkpoint; the steps after it were lost, and are done again."""

    time: float  # seconds since 1970
    step: int  # of the checkpoint, 0 without one
    reached: int  # the last step that is known to have been done before


def rollbacks(run: RunDir) -> list[Rollback]:
    """Return the rollbacks that cost steps, in order, by restarts and within an attempt."""
    ends = ("failed", "signalled", "checkpointed", "evaluated")
    events = run.read_events("resumed", "rolled_back", "first_step", *ends)
    forgotten = [{**vars(line), "event": "logged"} for line in ForgottenStep.read(run.path)]
    backs, reached = [], 0
    for sign in sorted([*events, *forgotten], key=itemgetter("time")):
        step, name = sign.get("step"), sign["event"]
        if type(step) is not int or not 0 <= step < INTEGER_LIMIT:
            continue
        if name in ends or name == "logged":
            reached = max(reached, step)
            continue
        step -= name == "first_step"  # of an attempt, without a checkpoint the first of all
        if step < reached:
            backs.append(Rollback(sign["time"], step, reached))
        reached = step
    return backs


def bad_hosts(run: RunDir, job: str, lost: Sequence[str] = ()) -> list[str]:
    """Return the hosts to exclude from the job: lost, or their ranks killed, BAD_HOST times."""
    # Those in `lost` were lost just now and are not recorded yet.
    blamed = [*lost, *(host for line in _lines(run, job) for host in line.hosts)]
    for attempt in find.attempts(run):
        if attempt.job == job:
            # Only the agent reports a rank that a signal ended; the peers report other errors.
            failures = RankFailure.of_attempt(run.attempt_logs(attempt.number))
            blamed += {failure.host for failure in failures if reasons.signal_of(failure.exit_code)}
    return sorted({host for host in blamed if blamed.count(host) >= decision.BAD_HOST})


def newest(run: RunDir, job: str) -> RestartCause | None:
    """Return the cause of the run's last restart; None if there was none."""
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
    """Count the attempts that ended with the exit code that asks for a restart."""
    return sum(attempt.state == "stopped" for attempt in find.attempts(run))


def _lines(run: RunDir, job: str) -> list[Restart]:
    # Restarts in earlier jobs of the run do not count.
    return [line for line in Restart.read(run.path) if line.job == job]
