"""Find out when the job ends, for the ranks, which know how long a checkpoint takes."""

import os
import subprocess

from rollcall.launch.node.identity import Node
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.run import JobEnd
from rollcall.run_dir import RunDir
from rollcall.timer import Every

EVERY = 300.0
"""Seconds between two questions, because a time limit can be changed."""
SOON = 10.0
"""The same if Slurm did not answer: its controller may be busy."""


class DeadlineWatcher:
    """Keeps the job's end in the run directory up to date, without ever waiting."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run = run
        self._job = node.job
        self._is_on = node.is_head and "SLURM_JOB_ID" in os.environ
        self._timer = Every(EVERY)
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
