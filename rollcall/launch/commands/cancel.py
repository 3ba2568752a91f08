"""`rollcall cancel RUN`: end a run's jobs. A run that is training saves first."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from rollcall.launch.runs import find, states
from rollcall.launch.runs.processes import Processes
from rollcall.launch.scheduler import slurm
from rollcall.records.job import Cancellation, JobRecord


def main(argv: Sequence[str]) -> int:
    """End the jobs of a live run; return the exit code."""
    options = find.parser("cancel", __doc__).parse_args(argv)
    run = find.find(options.run, options.root)
    job, live = states.live_job(run)
    ids = tuple(dict.fromkeys((job.id, *live))) if job.is_local else live or (job.id,)
    # Recorded first, so that the run counts as cancelled however it ends.
    Cancellation(list(ids), time.time()).append(run.path)
    if job.is_local:
        for pid in Processes().of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if live:  # older jobs of the run
            slurm.tell("scancel", *live)
    elif (record := JobRecord.read(run.path)) and record.more.get("allocation") == job.id:
        slurm.end_steps(job.id)  # the allocation stays the user's
    else:
        slurm.tell("scancel", *ids)
    jobs = f"job {ids[0]}" if len(ids) == 1 else f"jobs {', '.join(ids)}"
    print(f"asked {jobs} of run {run.name} to end; if it is training, it saves first")
    return 0
