"""May a run that has come down start again? By what brought it down, and by its progress.

job/restarts.jsonl has a line for each time that it did. A preempted run may come back for ever, and
one that starts again on more hosts. All else counts: a run that came down so often without a new
checkpoint between would do so again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from launch import reasons, runs
from train.run import RunDir, append_line, read_lines

Cause = Literal["preempted", "time limit", "asked to stop", "crash", "lost node", "more hosts"]

HARMLESS = ("preempted", "more hosts")
"""Causes that tell nothing of the run: it may come down by them as often as it likes."""

MOST = 3
"""How often in a row a run may come down without progress; the last time it has failed."""
BAD_HOST = 2
"""How often a host may bring a run down before its job leaves it out."""


def allowed(run: RunDir, job: str, cause: Cause) -> bool:
    """Whether a run that has just come down may start again in this job."""
    if cause in HARMLESS:
        return True
    reached, count, next_cause = _reached(run), 1, cause
    for line in reversed(_lines(run, job)):
        if line["cause"] not in HARMLESS:
            if line["step"] != reached:
                break
            # The ranks on other nodes crash before a node that is lost is missed.
            count += (line["cause"], next_cause) != ("crash", "lost node")
        next_cause = line["cause"]
    return count < MOST


def note(run: RunDir, job: str, cause: Cause, hosts: Sequence[str] = ()) -> None:
    """Write down that a run starts again.

    Args:
        run: the run.
        job: the id of its job.
        cause: what brought it down.
        hosts: which did it, where that is known.
    """
    fields = {"time": time.time(), "job": job, "cause": cause, "step": _reached(run)}
    append_line(run.job / "restarts.jsonl", {**fields, "hosts": list(hosts)})


def bad_hosts(run: RunDir, job: str, lost: Sequence[str] = ()) -> list[str]:
    """The hosts that the job is to leave out from now on: lost, or their ranks killed, twice.

    Args:
        run: the run.
        job: the id of its job.
        lost: hosts that are being lost, and not noted yet.
    """
    blamed = [*lost, *(host for line in _lines(run, job) for host in line["hosts"])]
    for attempt in runs.attempts(run):
        if attempt.job == job:
            # Only an agent tells of a rank that a signal ended; its peers fail by themselves.
            told = runs.failures(run, attempt)
            blamed += {each["host"] for each in told if reasons.signal_of(each["exit_code"])}
    return sorted({host for host in blamed if blamed.count(host) >= BAD_HOST})


def newest(run: RunDir, job: str) -> Cause | None:
    """What brought the run down the last time that it started again; None if it never did."""
    return next((line["cause"] for line in reversed(_lines(run, job))), None)


def saved_step(run: RunDir) -> int:
    """The step from which the run would go on: that of its newest checkpoint, 0 without one."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in run.checkpoints.glob("step-*"))
    return max((int(match[1]) for match in names if match), default=0)


def _reached(run: RunDir) -> int:
    """What grows as a run gets on: the step of its newest checkpoint.

    A program of the user's own has its checkpoints elsewhere, and says by its exit code that it has
    saved: then it is how often it has said so.
    """
    if step := saved_step(run):
        return step
    is_ours = run.config.exists()
    return 0 if is_ours else sum(attempt.state == "stopped" for attempt in runs.attempts(run))


def _lines(run: RunDir, job: str) -> list[dict[str, Any]]:
    """Earlier restarts; what an earlier job of the run went through does not count."""
    return [line for line in read_lines(run.job / "restarts.jsonl") if line["job"] == job]
