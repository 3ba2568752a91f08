"""Let all ranks stop after the same step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollcall.deadline import Deadline
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.signals import StopSignals
from rollcall.train.dist.world import World


@dataclass(frozen=True)
class Stop:
    """The member of the step that knows about signals and about the end of the job."""

    _world: World
    _signals: StopSignals
    _deadline: Deadline  # the end of the job; rank 0 looks at it
    _save_seconds: Callable[[], float]  # how long a save takes, which must end before

    def report(self) -> Mapping[str, float]:
        """Return whether this rank was asked to stop, and by whom."""
        by_scheduler = self._ends() or self._signals.by_scheduler
        return {"stop_by_person": self._signals.by_person, "stop_by_scheduler": by_scheduler}

    def settle(self, _step: int, agreed: Mapping[str, float]) -> Action:
        """Stop if any rank was asked to."""
        if agreed["stop_by_person"]:
            return Action.STOP
        return Action.REQUEUE if agreed["stop_by_scheduler"] else Action.CONTINUE

    def is_asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._ends() or self._signals.received is not None

    def agree(self) -> Action:
        """Return STOP or REQUEUE after a rank was asked to stop; every rank calls it together."""
        return Action.STOP if self._world.has_any(self._signals.by_person) else Action.REQUEUE

    @property
    def reason(self) -> str:
        """Why a run that is to be requeued stops."""
        if self._deadline.has_come:
            return "the end of the job is near"
        asked = self._signals.received
        return f"asked to stop by {asked.name if asked else 'a signal on another rank'}"

    def _ends(self) -> bool:
        return self._world.is_main and self._deadline.is_near(self._save_seconds())
