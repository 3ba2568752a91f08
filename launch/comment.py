"""A run's progress in squeue: the head keeps it as the comment of the job, `squeue -o '%i %k'`."""

from __future__ import annotations

import os
import subprocess
import time

from launch import runs, slurm
from launch.node import Node
from launch.slurm import SlurmError
from train.run import RunDir

EVERY = 30.0
"""Seconds between two changes at least: the controller serves the whole cluster."""


class Comment:
    """Keeps the comment of the job up to date; that it cannot never matters to the run."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run = run
        self._job = node.job
        self._is_on = node.is_head and "SLURM_JOB_ID" in os.environ
        self._next = 0.0
        self._step = 0
        self._process: subprocess.Popen[bytes] | None = None

    def update(self) -> None:
        """Write the newest logged step into the comment, if it is time to; waits for nothing."""
        # The last scontrol may still hang: a controller can be away for minutes.
        if not self._is_on or (self._process is not None and self._process.poll() is None):
            return
        if time.monotonic() < self._next:
            return
        line = next(iter(runs.last_lines(self._run.metrics)[-1:]), {})
        if line.get("step", 0) == self._step:
            return
        self._step = line["step"]
        self._next = time.monotonic() + EVERY
        text = f"step {self._step}, loss {line['loss']:.4g}, {line['samples_per_second']:.0f}/s"
        words = ("scontrol", "update", f"JobId={self._job}", f"Comment={text}")
        try:
            self._process = slurm.tell_in_background(*words)
        except SlurmError:  # no scontrol on the nodes
            self._is_on = False
