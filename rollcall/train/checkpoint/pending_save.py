"""The progress of one save, on which all ranks agree.

When all ranks have written their parts, rank 0, or on local disks one rank of each node, publishes
the checkpoint. Ranks see only sums of `signals` over all ranks, so all of them act alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from rollcall.train.checkpoint.background import ThreadJob, WriteJob
from rollcall.train.checkpoint.store import CheckpointStore


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    step: int
    facts: dict[str, Any]
    problem: str  # why it failed; empty if it succeeded
    stall: float  # seconds for which it held up training on this rank
    seconds: float  # from its start until this rank knew that it had ended


@dataclass
class PendingSave:
    """A save in flight."""

    store: CheckpointStore
    step: int
    facts: dict[str, Any]
    written: Path  # the directory that all ranks write into
    part_job: WriteJob  # writes this rank's part
    publish: Callable[[], object]  # called when all parts are written, if this rank publishes
    began: float  # by time.monotonic
    late: str = ""  # why the ranks stopped waiting for it; empty until they do
    _publishing: WriteJob | None = None
    _all_written: bool = False

    def __post_init__(self) -> None:
        self._stall = time.monotonic() - self.began  # training continues from here

    def signals(self) -> list[bool]:
        """Return three flags of this rank: its part is written, it has published, it has failed."""
        published = self._publishing is not None and self._publishing.poll() == ""
        return [self.part_job.poll() == "", published, bool(self._problem())]

    def settle(self, sums: Sequence[float]) -> SaveResult | None:
        """Act on the sums of all ranks' signals; return the result once the save has ended."""
        written, published, failed = sums
        if failed:
            return self._result(self._fail())
        if published == len(self.store.publishers):
            return self._result("")
        if written == self.store.world.world_size and not self._all_written:
            self._all_written = True
            if self.store.publishes:
                self._publishing = ThreadJob(self.publish)
        return None

    def _problem(self) -> str:
        problems = (job.poll() for job in (self.part_job, self._publishing) if job)
        return next(filter(None, problems), self.late)

    def _fail(self) -> str:
        problem = self.store.world.first_problem(self._problem())
        self.part_job.abandon()
        # The publishing thread may be renaming it now; deleting would empty the checkpoint.
        may_be_published = self._publishing is not None and not self._publishing.poll()
        if self.store.publishes and not may_be_published:
            ThreadJob(partial(rmtree, self.written, ignore_errors=True))
        return problem

    def _result(self, problem: str) -> SaveResult:
        seconds = time.monotonic() - self.began
        return SaveResult(self.step, self.facts, problem, self._stall, seconds)
