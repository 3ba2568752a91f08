"""Let all ranks stop after the same step, or continue in another group."""

import os
from dataclasses import dataclass

from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.signals import PERSON, SCHEDULER, StopSignals
from rollcall.train.ranks.world import World


@dataclass(frozen=True)
class Requests:
    """Ranks that were asked to stop, and ranks that were lost and are back."""

    by_person: float
    by_scheduler: float
    back: float


class GoOn(Exception):
    """Ends a training in this group of ranks: one is lost, or back; it holds what is kept."""


@dataclass(frozen=True)
class Stop:
    """The member of the step that knows about signals and about the end of the job."""

    _world: World
    _signals: StopSignals
    _deadline: Deadline  # the end of the job; rank 0 looks at it

    def report(self) -> Requests:
        """Report the requests to stop that this rank got, by who asked; rank 0, who is back."""
        received, members = self._signals.received, self._world.members
        back = len(members.back()) if members and self._world.is_main else 0
        return Requests(received in PERSON, self._ends() or received in SCHEDULER, back)

    def settle(self, step: Step, agreed: Requests) -> Action:
        """Stop if any rank was asked to; raise GoOn if one is back and this step can be kept."""
        if agreed.by_person:
            return Action.STOP
        if agreed.back and not (step.is_skipped or agreed.by_scheduler) and self._world.members:
            if self._world.is_main:
                self._world.members.let_in()
            raise GoOn
        return Action.REQUEUE if agreed.by_scheduler else Action.CONTINUE

    def is_asked(self) -> bool:
        """True if this rank was asked to stop."""
        return self._ends() or self._signals.received is not None

    def agree(self) -> Action:
        """Return STOP or REQUEUE after a rank was asked to stop; every rank calls it together."""
        by_person = self._world.has_any(self._signals.received in PERSON)
        return Action.STOP if by_person else Action.REQUEUE

    @property
    def is_queued_again(self) -> bool:
        """False if a supervisor started this rank without Slurm: nothing queues the run again."""
        return "ROLLCALL_WORLD_SIZE" not in os.environ or "SLURM_JOB_ID" in os.environ

    @property
    def reason(self) -> str:
        """The reason to stop of a run that no person asked to."""
        if self._deadline.has_come:
            return "the end of the job is near"
        asked = self._signals.received
        return f"asked to stop by {asked.name if asked else 'a signal on another rank'}"

    def _ends(self) -> bool:
        return self._world.is_main and self._deadline.is_near(self._deadline.save_seconds)
