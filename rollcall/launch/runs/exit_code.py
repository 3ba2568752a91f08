"""The exit code of a run that is over, for `submit --wait` and for the tasks of an array."""

import os
import signal
from collections.abc import Sequence

from rollcall.launch.runs import find, root_cause, states
from rollcall.records.job import local_jobs
from rollcall.records.run import State
from rollcall.records.run_dir import RunDir

CANCELLED = 128 + signal.SIGINT
"""Exit code if a person ended the run: Ctrl-C, `rollcall cancel` or scancel."""


def decide(state: State | None, is_cancelled: bool, codes: Sequence[int | None]) -> int:
    """Return the exit code of a run that ended in this state; None if nothing says how it ended.

    `codes` are the ranks' in a failed run, the likeliest cause first; a rank may have left with 0
    or 75.
    """
    if state == "done":
        return 0
    if is_cancelled:
        return CANCELLED
    if state in ("requeue", "stopped"):
        return os.EX_TEMPFAIL
    return next((code for code in codes if code not in (None, 0, os.EX_TEMPFAIL)), None) or 1


def of_run(run: RunDir, jobs: Sequence[str], before: int = 0, is_cancelled: bool = False) -> int:
    """Return the exit code of a run whose jobs, in order, are over.

    Args:
        before: how many attempts the run had before these jobs.
        is_cancelled: a person ended it by a signal that no record shows.
    """
    attempts = [attempt for attempt in find.attempts(run)[before:] if attempt.job in jobs]
    newest = attempts[-1] if attempts else None
    state = states.state_of(run.read_verdict(), newest)
    is_cancelled |= jobs[-1] in find.cancelled(run)
    if state not in ("done", "failed") and jobs[-1] not in local_jobs(run.job):
        known = states.ask(jobs[-1])
        is_cancelled |= known is not None and known.state == "CANCELLED"
    first = root_cause.of_newest(run).failure if newest and state != "done" else None
    codes = [part.exit_code for part in (first, newest) if part is not None]
    return decide(state, is_cancelled, codes)
