"""A run on this machine is known to be live from its submission to its end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rollcall.launch.runs import find, states
from rollcall.launch.runs.processes import Processes
from rollcall.launch.submission.executors import Local
from rollcall.records.attempt import AttemptEvent
from rollcall.records.job import local_output
from rollcall.records.run_dir import RunDir


def test_a_job_is_seen_as_soon_as_it_is_submitted(tmp_path: Path) -> None:
    """The kernel shows the command line of a new process a moment after its start."""
    cores, jobs, seen = os.sched_getaffinity(0), [], []
    os.sched_setaffinity(0, {min(cores)})  # so that the new process waits for this one
    try:
        for number in range(20):
            run = RunDir(tmp_path, str(number))
            run.job.mkdir(parents=True)
            jobs.append(Local(run.job).start(["true"], 1, None))
            seen += Processes().of(run)
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == [int(job.job_id) for job in jobs]
    for job in jobs:
        job.wait()


def test_a_run_that_ends_while_it_is_looked_at_is_not_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "a")
    run.create()
    run.job.mkdir()
    hosts = [socket.gethostname()]
    AttemptEvent(0, "1", "started", 1.0, hosts=hosts, ranks=1).append(run.path)
    local_output(run.job, "1", 0).touch()
    before = find.attempts(run)
    (job,) = find.jobs(run)
    assert states.of_newest(run, before, job, Processes()).state == "lost"
    AttemptEvent(0, "1", "ended", 2.0, state="finished").append(run.path)
    assert states.of_newest(run, before, job, Processes()).state == "done"
