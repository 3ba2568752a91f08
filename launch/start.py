"""How does a submission become a run? Prepare the run directory, submit, say where, follow."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from launch import again, executors, limits, place, slurm, snapshot
from launch.follow import Output, exit_code, follow
from launch.job import Job, render
from launch.node import visible_gpus
from launch.submission import ROOT, RefusedError, Submission, TakenError, launcher_copy, note
from train.run import RunDir, append_line, write_atomic

ASK_EVERY = 2.0
"""Seconds between two questions to squeue while waiting."""


def start(submission: Submission, local: bool) -> int:
    """Start a run, or say why there is nothing to start; return the exit code.

    Raises:
        RefusedError, SlurmError: the run cannot start; nothing is queued and nothing is left.
        TakenError: another submission has just made the same run.
    """
    run = submission.run
    try:
        reason = again.reason_to_leave_it(run, submission.resume)
    except again.FailedBeforeError as error:
        raise RefusedError(str(error)) from None
    if reason is not None:
        note(f"run {run.name} {reason}")
        return 0
    return _on_this_machine(submission) if local else _on_slurm(submission)


def _on_slurm(submission: Submission) -> int:
    run, job = submission.run, submission.job
    if job.nodes > 1 and place.is_node_local(run.path.parent):
        raise RefusedError(
            f"{run.path.parent} is on this machine alone: {job.nodes} nodes need a --root on a "
            "file system that they share"
        )
    executors.forget_surroundings()
    expected = limits.check(job, render(job))
    with _prepared(submission):
        jobs = [_submit(submission, job)]
    for later in submission.later:
        after = {**later.options, "dependency": f"afterany:{jobs[-1]}"}
        try:
            jobs.append(_submit(submission, replace(later, options=after)))
        except RefusedError as error:
            raise RefusedError(f"{error} (queued before: {', '.join(jobs)})") from None
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    print(f"submitted:     job {jobs[0]}, {nodes}, {expected}")
    if len(jobs) > 1:
        print(f"then:          jobs {', '.join(jobs[1:])}, each after the one before")
    is_array = "array" in job.options
    _say_where(run, is_array)
    if not submission.wait:
        return 0
    try:
        outputs = [run.job / f"slurm-{job_id}.out" for job_id in jobs]
        follow(Output(outputs), _is_over(jobs[-1]))
    except KeyboardInterrupt:
        print(f"\nthe job goes on; to end it: {_command('cancel', run)}", file=sys.stderr)
        return 128 + signal.SIGINT
    return _exit_code(run, jobs)


def _submit(submission: Submission, job: Job) -> str:
    """Queue one job of the run; return its id."""
    try:
        job_id = executors.Slurm(submission.run.job, render(job)).start()
    except executors.SubmitError as error:
        raise RefusedError(str(error)) from None
    try:
        _record(submission, job_id)
    except OSError:
        slurm.tell("scancel", job_id)  # nobody would find it
        raise
    return job_id


def _on_this_machine(submission: Submission) -> int:
    run, job = submission.run, submission.job
    if "array" in job.options or submission.later:
        raise RefusedError("--array and --chain are Slurm's to queue, and there is no sbatch here")
    if job.setup:
        note(
            "modules, environment and setup lines of --cluster are for Slurm's jobs: left out here"
        )
    asked, there = (job.gpus_per_node or 0) * job.nodes, len(visible_gpus(os.environ))
    if asked > there:
        raise RefusedError(
            f"--gpus-per-node {job.gpus_per_node}: {job.nodes} nodes would need {asked} GPUs on "
            f"this machine, and {there} are visible"
        )
    executors.forget_surroundings()
    with _prepared(submission), contextlib.chdir(job.directory):
        minutes = slurm.seconds(job.time) / 60 if job.time else None
        process = executors.Local(run.job).start(job.command, job.nodes, minutes)
    outputs = [run.job / f"{process.job_id}_{node}_log.out" for node in range(job.nodes)]
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    _record(submission, process.job_id)
    print(f"submitted:     process {process.job_id}, {nodes} on this machine")
    _say_where(run)
    if not submission.wait:
        return 0
    output = Output(outputs)
    try:
        follow(output, process.done)
    except KeyboardInterrupt:
        print("\nasked the run to save and stop", file=sys.stderr)
        os.kill(int(process.job_id), signal.SIGTERM)
        follow(output, process.done)
    return _exit_code(run, [process.job_id])


@contextlib.contextmanager
def _prepared(submission: Submission) -> Iterator[None]:
    """Make the run directory with code and recipe; take a new one away if starting fails."""
    run = submission.run
    is_new = False
    try:
        is_new = run.create()
        if submission.is_new and not is_new:
            raise TakenError(f"run {run.name} has just been made by another submission")
        run.job.mkdir(exist_ok=True)
        for recipe in submission.recipes:
            shutil.copyfile(recipe, run.job / recipe.name)
        store = run.path.parent / ".code"
        if submission.code is not None:
            snapshot.take(submission.code, run.code, run.job / "source", store)
        if submission.launcher is not None:
            snapshot.take(submission.launcher, launcher_copy(run), run.job / "rollcall", store)
        for name, text in submission.files.items():
            write_atomic(run.job / name, text)
        recorded = {**asdict(submission.job), "run_directory": str(run.path)}
        write_atomic(run.job / "job.json", json.dumps(recorded, indent=2) + "\n")
        installed = {f"{package.name}=={package.version}\n" for package in distributions()}
        write_atomic(run.job / "packages.txt", "".join(sorted(installed)))
        if submission.resume:
            run.forget_verdict()  # the supervisors leave a finished run alone
        if not is_new:
            whose = "the code it has" if submission.code is None else "the code of now"
            note(f"run {run.name} is there already: it continues, with {whose}")
        yield
    except BaseException as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RefusedError(f"{error.filename}: {error.strerror}") from None
        raise


def _record(submission: Submission, job_id: str) -> None:
    """Note what was asked, and with which versions."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "torchvision", "submitit", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    asked = {"argv": submission.argv, "directory": str(Path.cwd()), "versions": versions}
    append_line(
        submission.run.job / "submissions.jsonl", {"job": job_id, "time": time.time(), **asked}
    )


def _say_where(run: RunDir, is_array: bool = False) -> None:
    print(f"run directory: {run.path}")
    # The logs of an array are those of its tasks, which are runs of their own.
    print(
        f"follow it:     {_command('watch', run) if is_array else _command('logs --follow', run)}"
    )
    print(f"end it:        {_command('cancel', run)}", flush=True)


def _command(command: str, run: RunDir) -> str:
    """A command of ours about a run, as it can be typed where submit.py was."""
    python = "./env/run --quiet python" if "ROLLCALL_TORCH" in os.environ else "python"
    is_here = Path.cwd() == ROOT
    name = run.name if is_here and run.path.parent == ROOT / "runs" else str(run.path)
    words = f"{python} -m launch {command} {shlex.quote(name)}"
    return words if is_here else f"cd {shlex.quote(str(ROOT))} && {words}"


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


def _exit_code(run: RunDir, jobs: Sequence[str]) -> int:
    """How the last attempt in these jobs ended; one that found the run finished made none."""
    codes = [code for job_id in jobs if (code := exit_code(run, job_id)) is not None]
    if not codes:
        print(f"submit: job {jobs[-1]} ended before the run came to an end", file=sys.stderr)
        return 1
    return codes[-1]
