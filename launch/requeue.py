"""`python -m launch requeue RUN`: start a run's job again, and at once.

A job that runs is asked to save, ended and queued again; Slurm would then let it wait for two
minutes, which this skips. So it does for a job that waits after it has requeued itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from launch import runs, slurm, states
from launch.runs import NoRunError
from launch.slurm import SlurmError

PATIENCE = 180.0
"""Seconds for the old attempt to end: it may save, and Slurm ends what does not in KillWait."""
LOOK = 0.5
"""Seconds between two looks at whether it has."""
SOON = 8
"""Seconds in which an ending job is gone from its nodes; if not, Slurm's own wait counts."""


def main(argv: Sequence[str]) -> int:
    """Queue the job again; return the exit code."""
    options = runs.parser("requeue", __doc__).parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        job = states.look([run])[0][0].job
        again = f"submit it again: python launch/submit.py --name {run.name}"
        if job is None or job.is_local:
            raise NoRunError(f"run {run.name} has no Slurm job; {again}")
        info = slurm.queue([job.id]).get(job.id)
        if info is None:
            raise NoRunError(f"Slurm has forgotten job {job.id} of run {run.name}; {again}")
        if info.state != "PENDING":
            slurm.tell("scontrol", "requeue", job.id)
        _start_now(job.id)
    except (NoRunError, SlurmError) as error:
        return runs.refuse("requeue", error)
    print(f"job {job.id} of run {run.name} is queued again and may start at once")
    return 0


def again(job_id: str, leave_out: Sequence[str] = ()) -> None:
    """Queue the job that this process is part of again; Slurm ends it at once.

    Args:
        job_id: the job.
        leave_out: hosts that it is not to get another time.

    Raises:
        SlurmError: Slurm refuses, for instance because the job was submitted with --no-requeue.
    """
    try:
        slurm.tell("scontrol", "requeue", job_id)
    except SlurmError as error:
        if "pending" not in str(error):  # Slurm has queued it again itself, or has heard us before
            raise
    start_soon(job_id, *([f"ExcNodeList={','.join(leave_out)}"] if leave_out else []))


def start_soon(job_id: str, *changes: str) -> None:
    """Let a job that ends and is queued again wait for seconds only.

    By itself Slurm lets it wait for as long as its credentials live, two minutes, but not where a
    later start than now is asked for while it ends (22.05).

    Raises:
        SlurmError: it is not queued again.
    """
    slurm.tell("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{SOON}", *changes)


def _start_now(job_id: str) -> None:
    """Take the wait away as soon as the job waits.

    Raises:
        SlurmError: the old attempt does not end, or Slurm refuses.
    """
    end = time.monotonic() + PATIENCE
    while (info := slurm.queue([job_id]).get(job_id)) is None or info.state != "PENDING":
        if info is not None and info.state == "RUNNING":
            return  # it runs already
        if time.monotonic() > end:
            raise SlurmError(f"job {job_id} has not ended within {PATIENCE:.0f} s")
        time.sleep(LOOK)
    slurm.tell("scontrol", "update", f"JobId={job_id}", "StartTime=now")
