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
    names = live or (job.id,)
    # Recorded first, so that the run counts as cancelled however it ends.
    Cancellation(list(names), time.time()).append(run.path)
    if job.is_local:
        for pid in Processes().of(run, job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    elif (record := JobRecord.read(run.path)) and record.more.get("allocation") == job.id:
        slurm.end_steps(job.id)  # the allocation stays the user's
    else:
        slurm.tell("scancel", *names)
    what = f"job {names[0]}" if len(names) == 1 else f"jobs {', '.join(names)}"
    print(f"asked {what} of run {run.name} to end; if it is training, it saves first")
    return 0
