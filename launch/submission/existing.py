"""Decide whether a run that exists can be submitted again."""

import os
import re

from rollcall.launch.runs import find
from rollcall.launch.runs.processes import Processes
from rollcall.launch.scheduler import slurm
from rollcall.records.job import Submission
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir
from rollcall.text import listed


def reason_not_to_submit(run: RunDir, resume: bool) -> str | None:
    """Return why there is nothing to submit: the run is live or finished. None if it can start.

    Raises:
        RefusedError: the run has failed, and `resume` is false.
        SlurmError: squeue does not answer.
    """
    if live := _live_jobs(run):
        return f"is live ({listed(live, 3)}): nothing is submitted"
    verdict = run.read_verdict()
    if resume:
        return None
    if verdict is not None and verdict.state == "done":
        return f"is finished ({verdict.reason}): nothing is submitted; --resume continues it"
    ended = find.attempts(run)[-1:]
    if (verdict and verdict.state == "failed") or (ended and ended[0].state == "failed"):
        why = f" ({verdict.reason})" if verdict else ""
        advice = "add --resume to continue it with its own code, or choose another --name"
        raise RefusedError(f"run {run.name} has failed{why}: {advice}")
    return None


def _live_jobs(run: RunDir) -> list[str]:
    if not (known := find.jobs(run)):
        return []
    newest = known[-1]
    if newest.is_local:
        there = Processes().of(run, newest)
        return [f"process {there[0]} on this machine"] if there else []
    if not slurm.is_available():
        return []
    ended = find.attempts(run)[-1:]
    if newest.id == os.environ.get("SLURM_JOB_ID") and ended and ended[0].state is not None:
        return []  # the shell of the allocation in which it ran
    jobs = dict.fromkeys(record.job for record in Submission.read(run.path))
    jobs[newest.id] = None
    # A task of an array, or a group of nodes, is listed under two names: its job id and 12_3, 12+1.
    live: dict[int, str] = {}
    queue = slurm.queue(list(jobs))  # sorted by state; show the jobs by number
    for name, info in sorted(queue.items(), key=lambda item: int(re.split(r"\D", item[0])[0])):
        if info.state not in slurm.FINAL:
            live.setdefault(id(info), f"job {name} {info.state}")
    return list(live.values())
