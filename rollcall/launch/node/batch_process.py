"""The job's batch process: its heartbeat, who watches it, and how another host takes over.

The head's supervisor requeues the job if its batch process has died. If the step can do without the
first host, which has died with it, a supervisor that lost another node watches the heartbeat. The
first one to create the file of the next batch process starts it; if it is silent, too, the file
after it counts. A batch process that was replaced, or waits on a spare host, stands by: it takes
over once nothing of the run shows a sign of life.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.cli.installation import command
from rollcall.launch.node import heartbeat
from rollcall.launch.node.identity import start_of
from rollcall.launch.node.pulse import Pulse
from rollcall.launch.runs import find, restarts
from rollcall.launch.runs.decision import RestartFacts, decide
from rollcall.launch.scheduler import slurm
from rollcall.records.attempt import Heartbeat
from rollcall.records.job import BatchRecord, RestartCause
from rollcall.records.run_dir import RunDir
from rollcall.system.process import redirect_output, stat, wait_for_signal
from rollcall.system.timer import Every, RunningClock

BATCH_BEAT = 1.0
"""Seconds between two counts of the heartbeat."""
BATCH_POLL = 1.0
"""Seconds between two looks at the heartbeat."""
TRIES = 5
"""The number of times that the head asks Slurm to requeue the job, BATCH_POLL seconds apart."""
ANSWER = 10.0
"""Seconds that a stopped batch process has to continue before its finished job is cancelled."""
SILENCE_POLL = 0.25
"""Seconds between two looks at the heartbeat of a batch process that may have to be replaced."""
LOOKS = 6
"""Looks without a sign of life, half the patience apart, after which a batch process that stands by
takes over: clients of NFS show the times of files up to a minute late."""
OF_THE_JOB = ("SLURM_JOB", "SLURM_ARRAY_", "SLURM_CLUSTER_", "SLURM_CONF", "SLURM_RESTART_COUNT")
"""Prefixes of Slurm's variables that a step's process has in common with the job's script."""


class BatchHeartbeat:
    """The heartbeat of a job's batch process, and what another one needs to take its place."""

    def __init__(
        self, run: RunDir, start: str, number: int, words: Sequence[str], can_move: bool
    ) -> None:
        # `number` batch processes of this start of the job have died or were replaced.
        with contextlib.suppress(OSError):
            run.job.mkdir(parents=True, exist_ok=True)  # supervisors do not make it again
        self._pulse = Pulse(Heartbeat.of_batch(run.path, start, number), BATCH_BEAT)
        self._successor = Heartbeat.of_batch(run.path, start, number + 1)
        output = str(Path("/proc/self/fd/1").readlink())
        process = _identify(os.getpid())
        self._directory = run.path
        self._record = BatchRecord(start, number, list(words), output, can_move, process)
        with contextlib.suppress(OSError):  # a full disk must not end a run
            self._record.write(run.path)

    def is_replaced(self) -> bool:
        """Return True if another host runs the job's batch process by now."""
        return self._successor.exists()

    def have_standby(self, host: str) -> None:
        """Have another batch process stand by on a host of the job."""
        with contextlib.suppress(OSError, slurm.SlurmError):
            _start(host, self._record.output, self._record.words)

    def end(self, has_ended: bool) -> None:
        """Give no more signs of life; write down whether this process did all that it had to."""
        self._pulse.end(is_over=False)
        with contextlib.suppress(OSError):
            if has_ended:
                replace(self._record, has_ended=True).write(self._directory)


class BatchWatcher:
    """The head's view of its job's batch process, which may die or be stopped."""

    def __init__(self, run: RunDir, job: str, record: BatchRecord) -> None:
        self._run, self._job, self._process = run, job, record.process or ""
        self._heartbeat = Heartbeat.of_batch(run.path, record.start, record.number)
        self._successor = Heartbeat.of_batch(run.path, record.start, record.number + 1)
        self._timer, self._clock = Every(BATCH_POLL), RunningClock()
        self._seen = (b"", 0.0)
        self._was_woken = False
        self._tries, self._next_try = TRIES, Every(BATCH_POLL)

    def look(self) -> None:
        """Wake the batch process if it seems to be stopped; never wait."""
        if not self._timer.is_due():
            return
        now, count = self._clock.read(), self._count()
        if count != self._seen[0]:
            self._seen, self._was_woken = (count, now), False
        elif self._silence > heartbeat.SUSPICION and not self._was_woken:
            self._wake()

    def requeue_if_gone(self, comes_back: bool) -> None:
        """Requeue a job that is to come back, in place of a batch process that has died, once."""
        if not self._next_try.is_due() or self._successor.exists():
            return
        facts = RestartFacts(gone=self._is_gone, comes_back=comes_back)
        if decide("attempt runs", "batch silent", facts).action == "requeue":
            self._requeue()

    def finish(self, comes_back: bool) -> None:
        """At the end of this node's part: see to it that the job ends, or comes back."""
        if self._successor.exists():  # the job goes on without this step
            return
        first, began, passed = self._count(), self._clock.read(), 0.0
        self._was_woken = False
        limit = ANSWER if self._is_here else max(ANSWER, heartbeat.patience())
        while not (is_gone := self._is_gone) and passed < limit:
            if self._answers(first):
                return
            if not self._was_woken and (self._is_here or passed > ANSWER / 4):
                self._wake()
            time.sleep(BATCH_POLL / 10)
            passed = self._clock.read() - began
        rule = decide("run over", "batch silent", RestartFacts(comes_back=comes_back, gone=is_gone))
        while rule.action == "requeue" and self._tries:
            self._requeue()
            time.sleep(BATCH_POLL if self._tries else 0)
        if rule.action == "cancel the job":  # it is stopped, and the job would keep its nodes
            with contextlib.suppress(slurm.SlurmError):
                slurm.tell("scancel", self._job)

    def _count(self) -> bytes:
        return self._heartbeat.read(is_doubted=self._silence > heartbeat.SUSPICION)

    def _wake(self) -> None:
        self._was_woken = True
        with contextlib.suppress(slurm.SlurmError):
            slurm.in_background(["scancel", "--batch", "--signal=CONT", self._job])

    def _answers(self, first: bytes) -> bool:
        """Return True if it is not stopped, or if its heartbeat continues on another host."""
        if self._is_here:
            return stat(self._process.split()[1])[:1] not in (["T"], ["t"], [])
        return self._count() != first

    def _requeue(self) -> None:
        """Try to requeue the job, unless that was done, was refused too often or is not allowed."""
        cause: RestartCause = "lost batch process"
        if not self._tries:
            return
        if self._tries == TRIES:
            facts = RestartFacts(
                cancelled=self._job in find.cancelled(self._run),
                in_vain=restarts.in_vain(self._run, self._job, cause),
            )
            if decide("restart wanted", "facts known", facts).action != "start again":
                self._tries = 0
                return
            restarts.note(self._run, self._job, cause)  # before: Slurm ends us at once
        try:
            slurm.requeue_own_job(self._job)
            self._tries, text = 0, "is requeued"
        except slurm.SlurmError as error:  # the controller may be busy with the end of the job
            self._tries, text = self._tries - 1, f"could not be requeued: {error}"
        said = f"supervise: the batch process of job {self._job} was lost; the job {text}"
        print(said, file=sys.stderr, flush=True)

    @property
    def _silence(self) -> float:
        return self._clock.read() - self._seen[1]

    @property
    def _is_here(self) -> bool:
        """True if it runs on this host, where its process can be looked for."""
        return self._process.startswith(f"{_pid_namespace()} ")

    @property
    def _is_gone(self) -> bool:
        """True if it has died, or is silent on another host."""
        if not self._is_here:
            return self._silence > heartbeat.patience()
        return _identify(int(self._process.split()[1])) != self._process


def record_of(run: RunDir, job: str) -> BatchRecord | None:
    """Return the record of the batch process of this start of a job; None if there is none."""
    known = BatchRecord.read(run.path)
    return known if known is not None and known.start == start_of(job, os.environ) else None


def take_over(run: RunDir, job: str, host: str, lost: str | None) -> None:
    """Start another batch process here if the job's own is silent and no other host does.

    Return when another one is alive, or when the one started here has ended. `lost` is the host of
    the lost node, if it is known.
    """
    known = record_of(run, job)
    if known is None or not known.can_move:
        return  # the job ends with its first host
    # Nothing was heard of this host for long already if the batch process was there.
    was_there = lost is not None and (known.process or "").startswith(f"{lost}:")
    silence = heartbeat.SUSPICION if was_there else heartbeat.patience()
    number = known.number
    while _is_silent(Heartbeat.of_batch(run.path, known.start, number), silence):
        number, silence = number + 1, heartbeat.patience()
        is_first = Heartbeat.of_batch(run.path, known.start, number).create()
        if decide("node left", "batch silent", RestartFacts(first=is_first)).action == "take over":
            # Wait for it: this process is the last of its step, and Slurm would end both together.
            _start(host, known.output, [f"--number={number}", *known.words]).wait()
            return


def _start(host: str, output: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a batch process on a host, in a separate step: Slurm may end a dead host's step."""
    step = [*slurm.step(os.environ["SLURM_JOB_ID"], [host]), "--mem=0", "--output=none"]
    line = [*step, *command("batch"), f"--output={output}", *words]
    env = {name: value for name, value in os.environ.items() if _is_of_the_job(name)}
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, env=env, start_new_session=True)


def stand_by(run: RunDir, start: str, number: int) -> int:
    """Wait until nothing of the run lives; return our number, which is above `number`."""
    seen, looks = 0.0, 0
    while True:
        is_asked = wait_for_signal([signal.SIGTERM], heartbeat.patience() / 2) is not None
        known = BatchRecord.read(run.path)
        if is_asked or (known is not None and known.start == start and known.has_ended):
            sys.exit(os.EX_UNAVAILABLE)
        newest = Heartbeat.newest(run.path, f"{start}.")
        seen, looks = newest, looks + 1 if newest == seen != 0.0 else 0
        while not looks and Heartbeat.of_batch(run.path, start, number + 1).exists():
            number += 1
        with contextlib.suppress(OSError):
            if looks >= LOOKS and Heartbeat.of_batch(run.path, start, number + 1).create():
                return number + 1


def _is_silent(batch: Heartbeat, silence: float) -> bool:
    count, clock = batch.read(), RunningClock()  # if the job is suspended, so is its batch process
    while clock.read() < silence:
        time.sleep(SILENCE_POLL)
        if batch.read(is_doubted=True) not in (b"", count):
            return False
    return True


def leave_step(output: str) -> str:
    """Act as the job's script, which writes to `output`; return the id of the step that is left."""
    with contextlib.suppress(OSError):  # it was not a file; the srun of the step ends early
        redirect_output(os.open(output, os.O_WRONLY | os.O_APPEND))
    # Otherwise the next srun would take what describes this step for its own options.
    step = os.environ["SLURM_STEP_ID"]
    for name in [name for name in os.environ if not _is_of_the_job(name)]:
        del os.environ[name]
    return step


def _is_of_the_job(name: str) -> bool:
    return not name.startswith(("SLURM_", "SRUN_")) or name.startswith(OF_THE_JOB)


def _pid_namespace() -> str:
    return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"


def _identify(pid: int) -> str:
    """Identify a process of this host for as long as the host runs; its pid may be used again."""
    fields = stat(pid)
    return f"{_pid_namespace()} {pid} {fields[19]}" if fields and fields[0] not in "ZX" else ""
