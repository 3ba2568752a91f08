"""`python -m launch cancel RUN`: end a run's jobs. A run that trains is asked to save first."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from launch import runs, slurm, states
from launch.runs import NoRunError
from launch.slurm import SlurmError
from train.run import append_line


def main(argv: Sequence[str]) -> int:
    """End the jobs of a live run; return the exit code."""
    options = runs.parser("cancel", __doc__).parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        job, live = states.live_job(run)
        names = live or (job.id,)
        # First, so that the run counts as cancelled whatever it answers.
        append_line(run.job / "cancelled.jsonl", {"jobs": names, "time": time.time()})
        if job.is_local:
            for pid in runs.local_processes(run, job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        else:
            slurm.tell("scancel", *names)
    except (NoRunError, SlurmError) as error:
        return runs.refuse("cancel", error)
    what = f"job {names[0]}" if len(names) == 1 else f"jobs {', '.join(names)}"
    print(f"asked {what} of run {run.name} to end; a run that trains saves first")
    return 0
