"""Is this run there already, and what does submitting it again mean?"""

from __future__ import annotations

from launch import runs, slurm
from train.run import RunDir, read_lines

MOST_TOLD = 3
"""Jobs that are named where there may be hundreds."""


class FailedBeforeError(Exception):
    """The run has failed, and nobody has said that it is to go on; the message says how."""


def reason_to_leave_it(run: RunDir, resume: bool) -> str | None:
    """Why there is nothing to submit: the run is live, or finished. None if it can start or go on.

    Args:
        run: the run.
        resume: whether a run that has failed or is finished shall go on.

    Raises:
        FailedBeforeError: it has failed, and `resume` is false.
        SlurmError: squeue does not answer.
    """
    live = _live_jobs(run)
    if live:
        more = f", and {len(live) - MOST_TOLD} more" if len(live) > MOST_TOLD else ""
        return f"is live ({', '.join(live[:MOST_TOLD])}{more}): nothing is submitted"
    verdict = run.read_verdict()
    if resume:
        return None
    if verdict is not None and verdict.state == "done":
        return f"is finished ({verdict.reason}): nothing is submitted; --resume continues it"
    ended = runs.attempts(run)[-1:]
    if (verdict and verdict.state == "failed") or (ended and ended[0].state == "failed"):
        why = f" ({verdict.reason})" if verdict else ""
        raise FailedBeforeError(
            f"run {run.name} has failed{why}: add --resume to continue it with the code it has, or "
            "give another --name"
        )
    return None


def _live_jobs(run: RunDir) -> list[str]:
    newest = runs.newest_job(run)
    if newest is None:
        return []
    if newest.is_local:
        there = runs.local_processes(run, newest)
        return [f"process {there[0]} on this machine"] if there else []
    if not slurm.is_available():
        return []
    jobs = dict.fromkeys(line["job"] for line in read_lines(run.job / "submissions.jsonl"))
    jobs[newest.id] = None
    # A job stands there by two names, its own and, for a task of an array, "12_3".
    live: dict[int, str] = {}
    queue = slurm.queue(list(jobs))  # by state; people read jobs in the order of their numbers
    for name, info in sorted(queue.items(), key=lambda item: int(item[0].partition("_")[0])):
        if info.state not in slurm.FINAL:
            live.setdefault(id(info), f"job {name} {info.state}")
    return list(live.values())
