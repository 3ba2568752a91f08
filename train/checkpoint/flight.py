"""One save on its way to disk: what each rank knows of it, and what all of them do.

Every rank writes its part; rank 0 publishes when all have, or a rank of each node where each node
has its own; all end it when that is done or one of them failed. How far the others are, a rank
knows only from the sums of `signals` over all ranks, which every rank acts on at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

from train.checkpoint.background import Job, Threaded
from train.world import World


@dataclass(frozen=True)
class Outcome:
    """How a save ended.

    Attributes:
        problem: why it failed, or nothing.
        stall: seconds for which it held up this rank.
        seconds: from its begin to the moment when this rank knew of its end.
    """

    step: int
    problem: str
    stall: float
    seconds: float


class Flight:
    """A save that has begun."""

    def __init__(
        self,
        world: World,
        step: int,
        written: Path,
        own: Job,
        publish: Callable[[], object] | None,
        began: float,
        publishers: int = 1,
    ) -> None:
        """The training goes on from here.

        Args:
            written: the directory in which all ranks write.
            own: the writing of this rank's part.
            publish: what this rank does when all parts are written, if it is one that publishes.
            began: when, by the monotonic clock.
            publishers: how many ranks publish.
        """
        self.late = ""  # why nobody waits for it any longer
        self._world = world
        self._step = step
        self._written = written
        self._own = own
        self._publish = publish
        self._publishers = publishers
        self._publishing: Job | None = None
        self._all_written = False
        self._began = began
        self._stall = time.monotonic() - began

    def signals(self) -> list[bool]:
        """What this rank knows: own part written, published, failed."""
        published = self._publishing is not None and self._publishing.poll() == ""
        return [self._own.poll() == "", published, bool(self._problem())]

    def settle(self, sums: Sequence[float]) -> Outcome | None:
        """Go on as all ranks must; how the save ended, once it has."""
        written, published, failed = sums
        if failed:
            return self._outcome(self._fail())
        if published == self._publishers:
            return self._outcome("")
        if written == self._world.world_size and not self._all_written:
            self._all_written = True
            if self._publish:
                self._publishing = Threaded(self._publish)
        return None

    def _problem(self) -> str:
        jobs = [self._own, *([self._publishing] if self._publishing else [])]
        return next(filter(None, (job.poll() for job in jobs)), self.late)

    def _fail(self) -> str:
        problem = self._world.first_problem(self._problem())
        self._own.abandon()
        # Not what may be renamed right now: that would empty a published checkpoint.
        publishing = self._publishing is not None and not self._publishing.poll()
        if self._publish and not publishing:
            Threaded(partial(rmtree, self._written, ignore_errors=True))
        return problem

    def _outcome(self, problem: str) -> Outcome:
        return Outcome(self._step, problem, self._stall, time.monotonic() - self._began)
