"""Show a run's progress in squeue, as the comment of its job: `squeue -o '%i %k'`."""

import os
import subprocess

from rollcall.launch.node.identity import Node
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.run import LoggedStep
from rollcall.run_dir import RunDir
from rollcall.timer import Every

EVERY = 30.0
"""Seconds between two changes at least: the controller serves the whole cluster."""

SOON = 10.0
"""Seconds until the next look for a step, if none was logged since."""


class JobComment:
    """Keeps the comment of the job up to date; a failure to do so never affects the run."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run = run
        self._job = node.job
        self._is_on = node.is_head and "SLURM_JOB_ID" in os.environ
        self._timer = Every(EVERY)
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
