"""Requeue the job that this process is part of."""

from collections.abc import Sequence

from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError

SOON = 8
"""Seconds until a requeued job may start: by then it should be gone from its nodes."""


def own_job(job_id: str, leave_out: Sequence[str] = ()) -> None:
    """Requeue the job that this process is part of, without some hosts; Slurm ends it at once.

    Raises:
        SlurmError: Slurm refuses, for instance because the job was submitted with --no-requeue.
    """
    try:
        slurm.tell("scontrol", "requeue", job_id)
    except SlurmError as error:
        if "pending" not in str(error):  # Slurm has requeued it itself, or has heard us before
            raise
    start_soon(job_id, *([f"ExcNodeList={','.join(leave_out)}"] if leave_out else []))


def start_soon(job_id: str, *changes: str) -> None:
    """Let a job that ends and is requeued wait for a few seconds only.

    By default, Slurm lets it wait until its credentials expire, which takes two minutes. It does
    not if a start time in the future is set while the job ends (22.05).
    """
    slurm.tell("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{SOON}", *changes)
