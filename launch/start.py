"""How does a submission become a run? Prepare the run directory, submit, say where, follow."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launch import executors, slurm, snapshot
from launch.follow import Output, exit_code, follow
from launch.node import visible_gpus
from launch.submission import RefusedError, Submission, note
from train.run import RunDir, append_line

ASK_EVERY = 2.0
"""Seconds between two questions to squeue while waiting."""


def on_slurm(submission: Submission) -> int:
    """Submit to Slurm; return the exit code.

    Raises:
        RefusedError, SlurmError: Slurm would not take the job, or the run cannot be written;
            nothing is queued and nothing is left.
    """
    executors.forget_surroundings()
    start = slurm.check(submission.job, submission.script)
    run = submission.run
    with _prepared(submission):
        try:
            job_id = executors.Slurm(run.job, submission.script).start()
        except executors.SubmitError as error:
            raise RefusedError(str(error)) from None
    output = run.job / f"slurm-{job_id}.out"
    _announce(submission, job_id, f"job {job_id}, {start}", output)
    if not submission.wait:
        return 0
    try:
        follow(Output([output]), _is_over(job_id))
    except KeyboardInterrupt:
        print(f"\nthe job goes on; to end it: scancel {job_id}", file=sys.stderr)
        return 128 + signal.SIGINT
    return _exit_code(run, job_id)


def on_this_machine(submission: Submission) -> int:
    """Start every node as a process of this machine; return the exit code.

    Raises:
        RefusedError: there are not that many GPUs, or the run cannot be written.
    """
    run, job = submission.run, submission.job
    asked, there = (job.gpus_per_node or 0) * job.nodes, len(visible_gpus(os.environ))
    if asked > there:
        raise RefusedError(
            f"--gpus-per-node {job.gpus_per_node}: {job.nodes} nodes would need {asked} GPUs on "
            f"this machine, and {there} are visible"
        )
    executors.forget_surroundings()
    with _prepared(submission), contextlib.chdir(run.code):
        minutes = slurm.seconds(job.time) / 60 if job.time else None
        process = executors.Local(run.job).start(job.command, job.nodes, minutes)
    outputs = [run.job / f"{process.job_id}_{node}_log.out" for node in range(job.nodes)]
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    what = f"process {process.job_id}, {nodes} on this machine (kill {process.job_id} ends it)"
    _announce(submission, process.job_id, what, outputs[0])
    if not submission.wait:
        return 0
    output = Output(outputs)
    try:
        follow(output, process.done)
    except KeyboardInterrupt:
        print("\nasked the run to save and stop", file=sys.stderr)
        os.kill(int(process.job_id), signal.SIGTERM)
        follow(output, process.done)
    return _exit_code(run, process.job_id)


@contextlib.contextmanager
def _prepared(submission: Submission) -> Iterator[None]:
    """Make the run directory with code and recipe; take a new one away if starting fails."""
    run = submission.run
    is_new = not run.path.exists()
    try:
        run.create()
        run.job.mkdir(exist_ok=True)
        for recipe in submission.recipes:
            shutil.copyfile(recipe, run.job / recipe.name)
        if submission.code is not None:
            snapshot.take(submission.code, run)
        else:
            note(f"run {run.name} is there already: it continues, with the code it has")
        yield
    except BaseException as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RefusedError(f"{error.filename}: {error.strerror}") from None
        raise


def _announce(submission: Submission, job_id: str, what: str, output: Path) -> None:
    """Record what was asked, and with which versions; say where the run is."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "torchvision", "submitit", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    asked = {"argv": submission.argv, "directory": str(Path.cwd()), "versions": versions}
    append_line(
        submission.run.job / "submissions.jsonl", {"job": job_id, "time": time.time(), **asked}
    )
    print(f"submitted:     {what}")
    print(f"run directory: {submission.run.path}")
    print(f"follow it:     tail -F {output}", flush=True)


def _is_over(job_id: str) -> Callable[[], bool]:
    """Whether a job has ended, asked of Slurm now and then."""
    asked = 0.0

    def is_over() -> bool:
        nonlocal asked
        if time.monotonic() - asked < ASK_EVERY:
            return False
        asked = time.monotonic()
        return slurm.state(job_id) in (None, *slurm.FINAL)

    return is_over


def _exit_code(run: RunDir, job_id: str) -> int:
    code = exit_code(run, job_id)
    if code is None:
        print(f"submit: job {job_id} ended before the run came to an end", file=sys.stderr)
        return 1
    return code
