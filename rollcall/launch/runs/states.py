"""The state of runs, from their files, and from Slurm where the files do not say how they ended."""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from rollcall.launch.runs import find, reasons, restarts
from rollcall.launch.runs.find import NoRunError, SubmittedJob
from rollcall.launch.runs.processes import Processes
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import FINAL, JobInfo, SlurmError
from rollcall.records.attempt import AttemptRecord
from rollcall.records.job import BatchRecord, JobRecord
from rollcall.records.run import LoggedStep, State, Verdict, noticed, start_and_steps
from rollcall.records.run_dir import RunDir
from rollcall.system.files import changed

LIVE = ("pending", "running")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
CANCELLED = "it was cancelled"
STOPPED_EARLY = "stopped early: "
"""In the verdict of a run that `train.patience` ended."""
ENDS: dict[str | None, State] = {"finished": "done", "stopped": "stopped"}
"""The state of a run that has written no verdict, by the state of its newest attempt."""
SILENCE = 300.0
"""Seconds without a line after which a run without a launcher counts as lost."""


@dataclass(frozen=True)
class Condition:
    """The state of a run, and what it is based on."""

    # pending, running, done, stopped, requeue, failed; lost if nothing says how it ended; unknown
    # if Slurm or the machine that would know cannot be asked.
    state: str
    note: str = ""  # why, in words
    job: SubmittedJob | None = None  # it runs, waits, or was the last; None without a launcher
    attempts: int = 0  # how often it has started
    nodes: int | None = None  # of its newest attempt or job
    live: tuple[str, ...] = ()  # the ids of its Slurm jobs that wait or run
    restarts: str = ""  # how often it has recovered, and why the last time
    verdict: Verdict | None = None  # of a run that has ended

    @property
    def is_live(self) -> bool:
        """True if it waits or runs."""
        return self.state in LIVE


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int | None = None  # updates done
    total: int | None = None  # to do in all
    loss: float | None = None  # of the newest logged step
    rate: float | None = None  # samples per second
    validation: Mapping[str, float] = field(default_factory=dict)  # of the newest evaluation
    left: timedelta | None = None  # until the last step, at the speed of the last logged steps


def look(runs: Sequence[RunDir]) -> tuple[list[Condition], str]:
    """Return the conditions of these runs, and what went wrong in asking Slurm about them."""
    processes = Processes()
    read = [_from_files(run, processes) for run in runs]
    known: dict[str, JobInfo] = {}
    complaint = ""
    if names := sorted({job.id for _, jobs in read for job in jobs}):
        try:
            known = slurm.queue(names)
        except SlurmError as error:
            complaint = str(error)
    lost = [jobs for condition, jobs in read if condition.state == "lost" and jobs]
    # Only the accounting can say how these ended.
    if unclear := [jobs[-1].id for jobs in lost if not any(job.id in known for job in jobs)]:
        known |= slurm.accounting(unclear)
    answers = []
    for run, (condition, jobs) in zip(runs, read, strict=True):
        answer = _unless_ended(run, _with_slurm(condition, jobs, known, complaint))
        # What it noticed last, such as a straggler.
        notes = noticed(run.path)[-1:] if answer.state == "running" else []
        has_recovered = answer.attempts > 1 and answer.state in ("pending", "running", "done")
        if lines := restarts.history(run) if has_recovered else []:
            times = "once" if len(lines) == 1 else f"{len(lines)} times, the last time"
            answer = replace(answer, restarts=f"restarted {times}: {lines[-1]}")
        answers.append(replace(answer, note="; ".join(filter(None, [*notes, answer.note]))))
    return answers, complaint


def live_job(run: RunDir) -> tuple[SubmittedJob, tuple[str, ...]]:
    """Return a run's live job and the ids of all its live Slurm jobs, or raise NoRunError."""
    (condition,), complaint = look([run])
    if not condition.is_live or condition.job is None:
        note = f" ({condition.note or complaint})" if condition.note or complaint else ""
        state = f"{condition.state}{note}; see rollcall status {find.typed(run)}"
        raise NoRunError(f"run {run.name} has no live job: {state}")
    return condition.job, condition.live


def live_attempt(run: RunDir) -> tuple[SubmittedJob, AttemptRecord]:
    """Return the job and the attempt of a running run; raise NoRunError if it has no ranks now."""
    job, _ = live_job(run)
    attempts = [attempt for attempt in find.attempts(run) if attempt.job == job.id]
    if not attempts or attempts[-1].state is not None:
        raise NoRunError(f"run {run.name} has no ranks now; see rollcall status {run.name}")
    return job, attempts[-1]


def ask(job_id: str) -> JobInfo | None:
    """Return Slurm's information on a job; None if it has none, or does not answer."""
    try:
        known = slurm.queue([job_id])
    except SlurmError:
        known = {}
    return (known or slurm.accounting([job_id])).get(job_id)


def _from_files(run: RunDir, processes: Processes) -> tuple[Condition, list[SubmittedJob]]:
    """Return the condition that the files of a run show, and the jobs that Slurm may know."""
    attempts = find.attempts(run)
    jobs = find.jobs(run, attempts)
    if not jobs:
        return _started_by_hand(run), jobs
    condition = of_newest(run, attempts, jobs[-1], processes)
    if _is_over(run, condition):
        return condition, []
    return condition, [job for job in jobs if not job.is_local]


def _is_over(run: RunDir, condition: Condition) -> bool:
    """Return True if the state of a run does not depend on its job, such as an allocation."""
    if condition.state in ("done", "running", "unknown"):
        return condition.state == "done"
    if condition.job is None or condition.job.is_local:
        return False
    record = JobRecord.read(run.path)
    if record is None or record.more.get("allocation") != condition.job.id:
        return False
    if condition.state == "lost" and condition.job.id not in find.cancelled(run):
        return False
    with contextlib.suppress(SlurmError):  # a step that was killed has not written its end
        return not slurm.steps(condition.job.id)
    return False


def of_newest(
    run: RunDir, attempts: Sequence[AttemptRecord], job: SubmittedJob, processes: Processes
) -> Condition:
    """Return the condition of a run's newest job, from its attempts and processes."""
    newest = attempts[-1] if attempts else None
    if job.is_local and not (newest and newest.state) and processes.begin():
        newest = find.newest_attempt(run)  # it may have ended before they were read
    note = f"there is no record of how job {job.id} ended"
    nodes = len(newest.hosts) if newest else None
    condition = Condition("lost", note, job, len(attempts), nodes)
    if job.is_local and newest and newest.hosts[0] != socket.gethostname():
        condition = replace(condition, state="unknown", note="it was started on another machine")
    elif newest and newest.state == "finished" and newest.job == job.id:
        return _ended(run, condition, newest)
    elif job.is_local and processes.of(run):
        pids = " ".join(map(str, processes.stopped(run)))
        note = f"stopped by a signal; to continue it: kill -CONT {pids}" if pids else ""
        return replace(condition, state="running", note=note)
    verdict = run.read_verdict()
    if newest is None or (newest.state is None and verdict is None):
        return condition
    # A later job of a chain makes no attempt if it finds the run finished.
    if newest.job != job.id and (verdict is None or verdict.state != "done"):
        return condition
    return _ended(run, condition, newest)


def state_of(verdict: Verdict | None, newest: AttemptRecord | None) -> State | None:
    """Return how a run ended; None if neither its verdict nor its newest attempt says so."""
    written = verdict.state if verdict is not None else None
    if written == "done" or newest is None:  # a later job of a chain then makes no attempt
        return "done" if written == "done" else None
    if newest.state == "failed":
        return "failed"  # whatever the verdict of an earlier attempt says
    return written or ENDS.get(newest.state)


def _ended(run: RunDir, condition: Condition, newest: AttemptRecord) -> Condition:
    """Return the condition of a run that has ended, as its head or its verdict says."""
    verdict = run.read_verdict()
    note = verdict.reason if verdict else ""
    state = state_of(verdict, newest) or condition.state
    if state == "done":
        note = str(find.alone(run, newest) or "".join(note.partition(STOPPED_EARLY)[1:]))
    elif state == "failed":
        note = f"rollcall why {find.typed(run)}"
    return replace(condition, state=state, note=note, verdict=verdict)


def _started_by_hand(run: RunDir) -> Condition:
    starts = len(run.read_events("started"))
    verdict = run.read_verdict()
    if verdict is not None:
        return Condition(verdict.state, verdict.reason, attempts=starts, verdict=verdict)
    age = time.time() - max(changed(run.metrics), changed(run.events))
    if age < SILENCE:
        return Condition("running", f"its newest line is {age:.0f} s old", attempts=starts)
    return Condition("lost", "it has no verdict", attempts=starts)


def _with_slurm(
    condition: Condition, jobs: Sequence[SubmittedJob], known: Mapping[str, JobInfo], complaint: str
) -> Condition:
    """Add what Slurm says about the run's jobs; a chain has several."""
    if not jobs:
        return condition
    live = [job for job in jobs if job.id in known and known[job.id].state not in FINAL]
    running = [job for job in live if known[job.id].state not in WAITING]
    condition = replace(condition, live=tuple(entry.id for entry in live))
    newest = condition.job
    if newest and newest.is_local and (condition.is_live or not (live or complaint)):
        return condition  # the run was continued on this machine: older jobs say nothing
    job = (running or live or jobs[-1:])[0]
    if job.id in known:
        return _from_slurm(replace(condition, job=job), known[job.id])
    if complaint and condition.state == "lost":
        return replace(condition, state="unknown", note="")
    return condition


def _from_slurm(condition: Condition, info: JobInfo) -> Condition:
    """Let Slurm decide while the job waits or runs, and if the files do not say how it ended."""
    condition = replace(condition, nodes=condition.nodes or info.nodes)
    if info.state in WAITING:
        note = reasons.pending(info.reason)
        if info.start != "N/A" and not reasons.is_held(info.reason):
            note += f"; expected to start at {info.start.replace('T', ' ')}"
        prefix = "again: " if condition.attempts else ""
        return replace(condition, state="pending", note=prefix + note, nodes=info.nodes)
    if info.state not in FINAL:
        note = "" if info.state == "RUNNING" else info.state.lower()
        return replace(condition, state="running", note=note)
    if info.state == "CANCELLED":
        return replace(condition, state="stopped", note=CANCELLED)
    if condition.state == "requeue":
        name = condition.job.id if condition.job else ""
        note = f"{condition.note}; job {name} has ended and is not requeued"
        return replace(condition, state="stopped", note=note)
    if condition.state != "lost":
        return condition
    if info.state == "COMPLETED":
        return replace(condition, state="done", note="according to Slurm")
    return replace(condition, state="failed", note=reasons.ended(info.state))


def _unless_ended(run: RunDir, condition: Condition) -> Condition:
    """Say what the run's files know if its job was cancelled, or lost its batch process."""
    job = condition.job
    if job and condition.state in ("requeue", "failed", "lost") and job.id in find.cancelled(run):
        return replace(condition, state="stopped", note=CANCELLED)
    is_open = condition.state in ("requeue", "stopped", "lost")
    if job and is_open and condition.note != CANCELLED and (text := lost_batch(run, job)):
        state = "failed" if condition.state == "lost" else "stopped"
        return replace(condition, state=state, note=f"{condition.note}; {text}")
    return condition


def lost_batch(run: RunDir, job: SubmittedJob) -> str:
    """Say that the batch process of a job that is over was killed; empty if it was not."""
    batch = None if job.is_local else BatchRecord.read(run.path)
    if batch is None or batch.process is None or batch.has_ended:
        return ""
    if batch.start.rpartition(".")[0] != job.id:
        return ""
    number = slurm.script_signal(job.id)
    how = f" by {', '.join(filter(None, reasons.of_signal(number)))}" if number else ""
    return f"the batch process on its first node was killed{how}"


def progress(run: RunDir, condition: Condition) -> Progress:
    """Return the progress of a run, from the end of its metrics, and from its verdict."""
    started, done, total, figures = start_and_steps(run.path)
    span = LoggedStep.span(run.path, since=started)
    if span is None:
        return Progress(done or None, total, validation=figures)  # its line comes a step later
    first, last = span
    verdict = condition.verdict
    # Not every step is logged; a failed run is at its last one, not at its checkpoint.
    if verdict is not None and verdict.step >= last.step and verdict.state != "failed":
        last = replace(last, step=verdict.step)
        total = verdict.step if verdict.state == "done" else total  # it may have stopped early
    left = None
    if total and last.step > first.step:
        seconds = (last.time - first.time) / (last.step - first.step)
        left = timedelta(seconds=round(min(max(0.0, seconds * (total - last.step)), 1e13)))
    return Progress(last.step, total, last.loss, last.samples_per_second, figures, left)
