"""The job's batch process: its heartbeat, and how the head's supervisor watches it."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.launch.node import heartbeat
from rollcall.launch.node.identity import Node, start_of
from rollcall.launch.runs import find, restarts
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.process import stat
from rollcall.records.attempt import Heartbeat
from rollcall.records.job import BatchRecord, RestartCause
from rollcall.run_dir import RunDir
from rollcall.timer import Every, RunningClock

LOOK = 1.0
"""Seconds between two looks at the heartbeat."""
TRIES = 5
"""How often the head asks Slurm to requeue the job, LOOK seconds apart."""
ANSWER = 10.0
"""Seconds that a stopped batch process has to continue before its finished job is cancelled."""


class BatchHeartbeat:
    """The heartbeat of a job's batch process, and what another one needs to take its place."""

    def __init__(
        self, run: RunDir, start: str, number: int, words: Sequence[str], can_move: bool
    ) -> None:
        self._count = 0  # `number` batch processes of this start of the job have died
        self._own = Heartbeat.of_batch(run.path, start, number)
        self._successor = Heartbeat.of_batch(run.path, start, number + 1)
        output = str(Path("/proc/self/fd/1").readlink())
        self.beat()
        process = _identify(os.getpid())
        self._directory = run.path
        self._record = BatchRecord(start, number, list(words), output, can_move, process)
        self._record.write(run.path)

    def beat(self) -> None:
        """Count."""
        self._count += 1
        self._own.write(b"%08d" % self._count)

    def is_replaced(self) -> bool:
        """Whether another host runs the job's batch process by now."""
        return self._successor.exists()

    def end(self) -> None:
        """Write down that this process has done all that it had to."""
        with contextlib.suppress(OSError):
            replace(self._record, has_ended=True).write(self._directory)


class BatchWatcher:
    """The head's view of its job's batch process, which may die or be stopped."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run, self._job = run, node.job
        record = BatchRecord.read(run.path) if "SLURM_JOB_ID" in os.environ else None
        is_ours = node.is_head and record and record.start == start_of(node.job, os.environ)
        self._record = record if is_ours else None
        self._heartbeat: Heartbeat | None = None
        if self._record:
            number = self._record.number
            self._heartbeat = Heartbeat.of_batch(run.path, self._record.start, number)
        self._timer, self._clock = Every(LOOK), RunningClock()
        self._seen = (b"", 0.0)
        self._was_woken = False
        self._tries, self._next_try = TRIES, Every(LOOK)

    def look(self) -> None:
        """Wake the batch process if it seems to be stopped; never wait."""
        if self._record is None or not self._timer.is_due():
            return
        now, count = self._clock.read(), self._count()
        if count != self._seen[0]:
            self._seen, self._was_woken = (count, now), False
        elif self._is_silent and not self._was_woken:
            self._wake()

    def requeue_if_gone(self) -> None:
        """Requeue the job in place of a batch process that has died, once."""
        if self._record is not None and self._next_try.is_due() and self._is_gone:
            self._requeue()

    def finish(self, comes_back: bool) -> None:
        """At the end of this node's part: see to it that the job ends, or comes back."""
        if self._record is None:
            return
        first, began, passed = self._count(), self._clock.read(), 0.0
        self._was_woken = False
        while not (is_gone := self._is_gone) and passed < ANSWER:
            if self._answers(first):
                return
            if not self._was_woken and (self._is_here or passed > ANSWER / 4):
                self._wake()
            time.sleep(LOOK / 10)
            passed = self._clock.read() - began
        if comes_back:
            while self._tries:
                self._requeue()
                time.sleep(LOOK if self._tries else 0)
        elif not is_gone:  # it is stopped, and the job would keep its nodes
            with contextlib.suppress(SlurmError):
                slurm.tell("scancel", self._job)

    def _count(self) -> bytes:
        assert self._heartbeat is not None
        return self._heartbeat.read(is_doubted=self._is_silent)

    def _wake(self) -> None:
        self._was_woken = True
        with contextlib.suppress(SlurmError):
            slurm.in_background(["scancel", "--batch", "--signal=CONT", self._job])

    def _answers(self, first: bytes) -> bool:
        """Whether it is not stopped; on another host, whether its heartbeat continues."""
        assert self._record is not None
        if self._is_here and self._record.process is not None:
            return stat(self._record.process.split()[1])[:1] not in (["T"], ["t"], [])
        return self._count() != first

    def _requeue(self) -> None:
        """Try to requeue the job, unless that was done, was refused too often or is not allowed."""
        cause: RestartCause = "lost batch process"
        if not self._tries:
            return
        if self._tries == TRIES:
            was_cancelled = self._job in find.cancelled(self._run)
            if was_cancelled or not restarts.allowed(self._run, self._job, cause):
                self._tries = 0
                return
            with contextlib.suppress(OSError):  # before: Slurm ends us at once
                restarts.note(self._run, self._job, cause)
        try:
            slurm.requeue_own_job(self._job)
            self._tries, text = 0, "is requeued"
        except SlurmError as error:  # the controller may be busy with the end of the job
            self._tries, text = self._tries - 1, f"could not be requeued: {error}"
        said = f"supervise: the batch process of job {self._job} was lost; the job {text}"
        print(said, file=sys.stderr, flush=True)

    @property
    def _is_silent(self) -> bool:
        return self._clock.read() - self._seen[1] > heartbeat.SILENCE

    @property
    def _is_here(self) -> bool:
        """Whether it runs on this host, where its process can be looked for."""
        known = self._record.process if self._record else None
        return known is not None and known.split()[0] == _pid_namespace()

    @property
    def _is_gone(self) -> bool:
        """Whether it has died; on another host, whether it is silent."""
        known = self._record.process if self._record else None
        if known is None or not self._is_here:
            return self._is_silent
        return _identify(int(known.split()[1])) != known


def _pid_namespace() -> str:
    return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"


def _identify(pid: int) -> str:
    """Identify a process of this host for as long as the host runs; its pid may be used again."""
    fields = stat(pid)
    return f"{_pid_namespace()} {pid} {fields[19]}" if fields and fields[0] not in "ZX" else ""
