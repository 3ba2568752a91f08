"""When does the job end? The head asks Slurm, at the start and when it is asked to stop.

The answer in job/deadline.json is for the ranks, which know how long a checkpoint takes: see
train.deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import time

from launch import slurm
from launch.node import Node
from launch.slurm import SlurmError
from train.deadline import FILE
from train.run import RunDir, write_atomic

EVERY = 300.0
"""Seconds between two questions: a limit can be changed."""
SOON = 10.0
"""The same where Slurm has not answered: its controller may be busy."""


class Deadline:
    """Keeps what the ranks know of the job's end up to date; waits for nothing."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._path = run.job / FILE
        self._job = node.job
        self._is_on = node.is_head and "SLURM_JOB_ID" in os.environ
        self._next = 0.0
        self._question: subprocess.Popen[bytes] | None = None
        if node.is_head:
            self._path.unlink(missing_ok=True)  # an earlier job's

    def ask(self) -> None:
        """Ask Slurm anew: a signal tells that the job's end may have moved."""
        self._next = 0.0

    def update(self) -> None:
        """Ask if it is time to, and write an answer down that has come."""
        if not self._is_on:
            return
        if self._question is None and time.monotonic() > self._next:
            self._next = time.monotonic() + EVERY
            try:
                self._question = slurm.ask_standing(self._job)
            except SlurmError:  # no squeue on the nodes
                self._is_on = False
        elif self._question is not None and self._question.poll() is not None:
            text = self._question.stdout.read() if self._question.stdout else b""
            self._question = None
            try:
                end = slurm.read_standing(text.decode()).end
                write_atomic(self._path, json.dumps({"end": end}) + "\n")
            except (ValueError, OSError):  # no answer, a full disk: no reason to end a run
                self._next = min(self._next, time.monotonic() + SOON)
