"""Ask Slurm's controller for the job's end, and show progress there, without waiting for it.

The controller serves the whole cluster and may be away for minutes; that never affects the run.
"""

import os
import subprocess

from rollcall.launch.node.identity import Node
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.job import JobRecord
from rollcall.records.run import JobEnd, LoggedStep
from rollcall.run_dir import RunDir
from rollcall.timer import Every

ASK_EVERY = 300.0
"""Seconds between two questions for the job's end, because a time limit can be changed."""
TELL_EVERY = 30.0
"""Seconds between two changes of the job's comment."""
SOON = 10.0
"""Seconds until the next try, if Slurm did not answer or no step was logged."""


def _speaks_to_slurm(node: Node) -> bool:
    return node.is_head and "SLURM_JOB_ID" in os.environ


class DeadlineWatcher:
    """Keeps the job's end in the run directory up to date, for the ranks that have to save."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run = run
        self._job = node.job
        self._is_on = _speaks_to_slurm(node)
        self._timer = Every(ASK_EVERY)
        self._question: subprocess.Popen[bytes] | None = None
        if node.is_head:
            JobEnd.place(run.path).unlink(missing_ok=True)  # an earlier job's

    def ask_soon(self) -> None:
        """Ask Slurm at the next update: after a signal, the job's end may have moved."""
        self._timer.make_due()

    def update(self) -> None:
        """Ask if it is time to, and write down an answer that has come."""
        if not self._is_on:
            return
        if self._question is None and self._timer.is_due():
            try:
                self._question = slurm.ask_status(self._job)
            except SlurmError:  # no squeue on the nodes
                self._is_on = False
        elif self._question is not None and self._question.poll() is not None:
            text = self._question.stdout.read() if self._question.stdout else b""
            self._question = None
            try:
                JobEnd(slurm.read_status(text.decode()).end).write(self._run.path)
            except (ValueError, OSError):  # no answer, or a full disk
                self._timer.make_due(SOON)


class JobComment:
    """Shows the run's progress in squeue, as the comment of its job: `squeue -o '%i %k'`.

    A comment that the user gave stays: sites read them, for accounting for example.
    """

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run = run
        self._job = node.job
        record = JobRecord.read(run.path)
        given = record.more.get("options") if record else None
        has_own = isinstance(given, dict) and "comment" in given
        self._is_on = _speaks_to_slurm(node) and not has_own
        self._timer = Every(TELL_EVERY)
        self._step = 0
        self._process: subprocess.Popen[bytes] | None = None

    def update(self) -> None:
        """Write the newest logged step into the comment, if it is time to; never wait."""
        # The last scontrol may still hang: a controller can be away for minutes.
        is_busy = self._process is not None and self._process.poll() is None
        if not self._is_on or is_busy or not self._timer.is_due():
            return
        newest = LoggedStep.newest(self._run.path)
        if newest is None or newest.step == self._step:
            self._timer.make_due(SOON)
            return
        self._step = newest.step
        text = f"step {newest.step}, loss {newest.loss:.4g}, {newest.samples_per_second:.0f}/s"
        words = ("scontrol", "update", f"JobId={self._job}", f"Comment={text}")
        try:
            self._process = slurm.in_background(words)
        except SlurmError:  # no scontrol on the nodes
            self._is_on = False
