"""`rollcall requeue RUN`: requeue a run's job, and start it without delay.

A running job is asked to save, ended, and queued again. Slurm would then let it wait for two
minutes; this command skips that wait, also for a job that has requeued itself.
"""

import time
from collections.abc import Sequence

from rollcall.launch.runs import find, states
from rollcall.launch.scheduler import slurm

PATIENCE = 180.0
"""Seconds that the old attempt has to end: it may save, and Slurm kills it after KillWait."""


def main(argv: Sequence[str]) -> int:
    """Requeue the job; return the exit code."""
    options = find.parser("requeue", __doc__).parse_args(argv)
    run = find.find(options.run, options.root)
    (condition,), _ = states.look([run])
    job = condition.job
    again = f"submit it again with --name {run.name}, or submit its sweep again"
    if job is None or job.is_local:
        raise find.NoRunError(f"run {run.name} has no Slurm job; {again}")
    if condition.state == "done" or job.id in find.cancelled(run):
        end = "is done" if condition.state == "done" else "was cancelled"
        raise find.NoRunError(f"run {run.name} {end}; {again}")
    state = slurm.state(job.id)
    if state is None:
        raise find.NoRunError(f"Slurm has forgotten job {job.id} of run {run.name}; {again}")
    if state != "PENDING":
        slurm.tell("scontrol", "requeue", job.id)
    deadline = time.monotonic() + PATIENCE
    while (state := slurm.state(job.id)) not in ("PENDING", "RUNNING"):
        if time.monotonic() > deadline:
            raise slurm.SlurmError(f"job {job.id} has not ended within {PATIENCE:.0f} s")
        time.sleep(0.5)
    if state == "PENDING":
        slurm.tell("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    print(f"job {job.id} of run {run.name} is requeued and may start at once")
    return 0
