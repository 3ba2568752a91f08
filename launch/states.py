"""How do runs stand? From their files, and from Slurm where the files do not tell the end."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch import reasons, runs, slurm
from launch.runs import Attempt, Job, NoRunError
from launch.slurm import FINAL, JobInfo, SlurmError
from train.run import RunDir, read_lines

LIVE = ("pending", "running")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
SILENCE = 300.0
"""Seconds without a line after which a run that nobody can be asked about counts as lost."""


@dataclass(frozen=True)
class Condition:
    """How a run stands.

    Attributes:
        state: pending, running, done, stopped, requeue, failed; lost if nothing tells its end,
            unknown if the one who could tell does not answer.
        note: why, in words.
        job: the one that runs, or waits, or was the last; None if it was started without the
            launcher.
        attempts: how often it has started.
        nodes: of its newest attempt or job; None if that is not known.
        live: the ids of its Slurm jobs that wait or run.
    """

    state: str
    note: str = ""
    job: Job | None = None
    attempts: int = 0
    nodes: int | None = None
    live: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether it waits or runs."""
        return self.state in LIVE


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step, total: updates done, and to do in all; None if that is not known.
        loss: of the newest logged step.
        rate: samples per second.
        left: seconds until the last step, at the speed of the last logged steps.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    rate: float | None = None
    left: float | None = None


def look(found: Sequence[RunDir]) -> tuple[list[Condition], str]:
    """How these runs stand; and what went wrong in asking Slurm, if anything did.

    squeue is asked once for all of them, and sacct once for the jobs that squeue has forgotten and
    whose files do not tell how they ended.
    """
    conditions = [_from_files(run) for run in found]
    jobs = [
        [] if condition.state == "done" else [job for job in runs.jobs(run) if not job.is_local]
        for run, condition in zip(found, conditions, strict=True)
    ]
    known: dict[str, JobInfo] = {}
    complaint = ""
    if names := sorted({job.id for some in jobs for job in some}):
        try:
            known = slurm.queue(names)
        except SlurmError as error:
            complaint = str(error)
    silent = [
        some[-1].id
        for condition, some in zip(conditions, jobs, strict=True)
        if _is_open(condition, some, known)
    ]
    if silent:
        known |= slurm.accounting(silent)
    answers = [
        _settled(run, _with_slurm(condition, some, known, complaint))
        for run, condition, some in zip(found, conditions, jobs, strict=True)
    ]
    return answers, complaint


def live_job(run: RunDir) -> tuple[Job, tuple[str, ...]]:
    """The job of a run that waits or runs, and all its Slurm jobs that do.

    Raises:
        NoRunError: none does, or the run was started without the launcher.
    """
    (condition,), complaint = look([run])
    if not condition.is_live or condition.job is None:
        note = f" ({condition.note or complaint})" if condition.note or complaint else ""
        raise NoRunError(f"run {run.name} has no live job: {condition.state}{note}")
    return condition.job, condition.live


def live_attempt(run: RunDir) -> tuple[Job, Attempt]:
    """The job and the attempt of a run that runs.

    Raises:
        NoRunError: its job has not started, or has ended.
    """
    job, _ = live_job(run)
    attempts = [attempt for attempt in runs.attempts(run) if attempt.job == job.id]
    if not attempts or attempts[-1].state is not None:
        raise NoRunError(f"run {run.name} has no ranks now: python -m launch status {run.name}")
    return job, attempts[-1]


def ask(job_id: str) -> JobInfo | None:
    """What Slurm still tells of a job; None if nothing, or if it does not answer."""
    try:
        known = slurm.queue([job_id])
    except SlurmError:
        known = {}
    return (known or slurm.accounting([job_id])).get(job_id)


def _is_open(condition: Condition, jobs: Sequence[Job], known: Mapping[str, JobInfo]) -> bool:
    """Whether only the accounting can tell how a run ended."""
    return condition.state == "lost" and bool(jobs) and not any(job.id in known for job in jobs)


def _from_files(run: RunDir) -> Condition:
    attempts = runs.attempts(run)
    job = runs.newest_job(run)
    if job is None:
        return _started_by_hand(run)
    newest = attempts[-1] if attempts else None
    condition = Condition(
        "lost",
        f"nothing tells how job {job.id} ended",
        job,
        len(attempts),
        len(newest.hosts) if newest else None,
    )
    if job.is_local and _is_elsewhere(newest):
        condition = replace(condition, state="unknown", note="its machine is another one")
    elif job.is_local and runs.local_processes(run, job):
        return replace(condition, state="running", note="")
    if newest is None or newest.state is None:
        return condition
    # A later job of a chain finds the run finished and makes no attempt.
    verdict = run.read_verdict()
    if newest.job != job.id and (verdict is None or verdict.state != "done"):
        return condition
    return _ended(run, condition, newest.state)


def _ended(run: RunDir, condition: Condition, state: str) -> Condition:
    """The condition of a run whose head has come to an end."""
    if state == "finished":
        return replace(condition, state="done", note="")
    verdict = run.read_verdict()
    reason = verdict.reason if verdict else ""
    if state == "stopped":
        return replace(condition, state=verdict.state if verdict else "stopped", note=reason)
    return replace(condition, state="failed", note=f"python -m launch why {run.name}")


def _started_by_hand(run: RunDir) -> Condition:
    """A run that torchrun or a plain process has started: nobody can be asked but its files."""
    starts = sum(line["event"] == "started" for line in read_lines(run.events))
    verdict = run.read_verdict()
    if verdict is not None:
        return Condition(verdict.state, verdict.reason, attempts=starts)
    age = time.time() - max(
        (path.stat().st_mtime for path in (run.metrics, run.events) if path.exists()), default=0
    )
    if age < SILENCE:
        return Condition("running", f"its last line is {age:.0f} s old", attempts=starts)
    return Condition("lost", "it has no verdict", attempts=starts)


def _with_slurm(
    condition: Condition, jobs: Sequence[Job], known: Mapping[str, JobInfo], complaint: str
) -> Condition:
    """The condition with what Slurm says of the run's jobs, of which a chain has several."""
    if not jobs:
        return condition
    live = [job for job in jobs if job.id in known and known[job.id].state not in FINAL]
    running = [job for job in live if known[job.id].state not in WAITING]
    job = (running or live or jobs[-1:])[0]
    condition = replace(condition, live=tuple(entry.id for entry in live))
    if job.id in known:
        return _from_slurm(replace(condition, job=job), known[job.id])
    if complaint and condition.state == "lost":
        return replace(condition, state="unknown", note="")
    return condition


def _from_slurm(condition: Condition, info: JobInfo) -> Condition:
    """What Slurm says wins while the job waits or runs, and where the files tell no end."""
    condition = replace(condition, nodes=condition.nodes or info.nodes)
    if info.state in WAITING:
        note = reasons.pending(info.reason)
        if info.start != "N/A":
            note += f"; expected to start at {info.start.replace('T', ' ')}"
        again = "again: " if condition.attempts else ""
        return replace(condition, state="pending", note=again + note, nodes=info.nodes)
    if info.state not in FINAL:
        note = "" if info.state == "RUNNING" else info.state.lower()
        return replace(condition, state="running", note=note)
    if info.state == "CANCELLED":
        return replace(condition, state="stopped", note="it was cancelled")
    if condition.state != "lost":
        return condition
    if info.state == "COMPLETED":
        return replace(condition, state="done", note="Slurm says so")
    return replace(condition, state="failed", note=reasons.ended(info.state))


def _settled(run: RunDir, condition: Condition) -> Condition:
    """The condition, but for a run whose job a person has cancelled."""
    job = condition.job
    if job and condition.state in ("requeue", "failed", "lost") and job.id in runs.cancelled(run):
        return replace(condition, state="stopped", note="it was cancelled")
    return condition


def _is_elsewhere(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.hosts[0] != socket.gethostname()


def progress(run: RunDir) -> Progress:
    """How far a run is, from the end of its metrics."""
    started, total = 0.0, None
    for line in read_lines(run.events):
        if line["event"] == "started":
            started = line["time"]
        total = line.get("steps", total)
    lines = [line for line in runs.last_lines(run.metrics) if "step" in line]
    if not lines:
        return Progress(total=total)
    last = lines[-1]
    first = next((line for line in lines if line["time"] >= started), last)
    left = None
    if total and last["step"] > first["step"]:
        seconds = (last["time"] - first["time"]) / (last["step"] - first["step"])
        left = seconds * (total - last["step"])
    return Progress(last["step"], total, last["loss"], last["samples_per_second"], left)
