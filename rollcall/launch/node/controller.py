"""Watch a job under Slurm: ask the controller for its end, show progress there, never wait for it.

The controller serves the whole cluster and may be away for minutes; that never affects the run.
"""

import contextlib
import subprocess

from rollcall.launch.node.batch_process import BatchWatcher, record_of
from rollcall.launch.node.identity import Node
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.job import JobRecord
from rollcall.records.run import JobEnd, LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.system.timer import Every

ASK_EVERY = 300.0
"""Seconds between two questions for the job's end, because a time limit can be changed."""
TELL_EVERY = 30.0
"""Seconds between two changes of the job's comment."""
SOON = 10.0
"""Seconds until the next try, if Slurm did not answer or no step was logged."""


class JobWatcher:
    """The watch of the head's supervisor over its job under Slurm.

    It keeps the job's end in the run directory up to date, for the ranks that have to save, and
    shows the run's progress in squeue, as the comment of the job: `squeue -o '%i %k'`.
    """

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run, self._job = run, node.job
        record = record_of(run, node.job)
        self.batch = BatchWatcher(run, node.job, record) if record else None
        self._ask_timer, self._tell_timer = Every(ASK_EVERY), Every(TELL_EVERY)
        self._question: subprocess.Popen[bytes] | None = None
        self._comment: subprocess.Popen[bytes] | None = None
        self._step = 0
        # A comment that the user gave stays: sites read them, for accounting for example.
        request = JobRecord.read(run.path)
        options = request.more.get("options") if request else None
        self._has_comment = isinstance(options, dict) and "comment" in options

    def update(self, is_end_doubted: bool = False) -> None:
        """Do what is due; `is_end_doubted`: Slurm may have moved the job's end."""
        if is_end_doubted:
            self._ask_timer.make_due()
        self._ask_for_end()
        # The last scontrol may still hang: a controller can be away for minutes.
        is_busy = self._comment is not None and self._comment.poll() is None
        if not self._has_comment and not is_busy and self._tell_timer.is_due():
            self._show_progress()
        if self.batch is not None:
            self.batch.look()

    def _ask_for_end(self) -> None:
        """Ask if it is time to, and write down an answer that has come."""
        if self._question is None and self._ask_timer.is_due():
            with contextlib.suppress(SlurmError):  # no squeue on the nodes
                self._question = slurm.ask_status(self._job)
        elif self._question is not None and self._question.poll() is not None:
            text = self._question.stdout.read() if self._question.stdout else b""
            self._question = None
            try:
                JobEnd(slurm.read_status(text.decode()).end).write(self._run.path)
            except (ValueError, OSError):  # no answer, or a full disk
                self._ask_timer.make_due(SOON)

    def _show_progress(self) -> None:
        """Write the newest logged step into the comment."""
        newest = LoggedStep.newest(self._run.path)
        if newest is None or newest.step == self._step:
            self._tell_timer.make_due(SOON)
            return
        self._step = newest.step
        text = f"step {newest.step}, loss {newest.loss:.4g}, {newest.samples_per_second:.0f}/s"
        words = ("scontrol", "update", f"JobId={self._job}", f"Comment={text}")
        with contextlib.suppress(SlurmError):  # no scontrol on the nodes
            self._comment = slurm.in_background(words)
