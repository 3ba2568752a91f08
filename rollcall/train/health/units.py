"""Check that all ranks gather the same weights at the same time, as sharded weights need."""

from dataclasses import dataclass

import torch

from rollcall.config import ConfigError
from rollcall.messages.text import listed
from rollcall.train.parallel.shard import Shard
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.run import Run


@dataclass(frozen=True)
class Traces:
    """Sums over the ranks: all traces are equal if their variance is zero."""

    total: float
    squares: float


class Units:
    """The member of the step that compares what the ranks have gathered since the start."""

    def __init__(self, run: Run, shard: Shard) -> None:
        self._run, self._shard = run, shard

    def report(self) -> Traces:
        """Return this rank's trace."""
        trace = self._shard.trace
        return Traces(trace, trace**2)

    def settle(self, step: Step, agreed: Traces) -> Action:
        """Go on if all ranks have gathered the same; otherwise raise ConfigError on all ranks."""
        world = self._run.world
        if agreed.squares * world.world_size == agreed.total**2:
            return Action.CONTINUE
        uses = self._shard.uses()
        of_ranks = world.gather(torch.tensor([*uses.values()]))
        differs = (of_ranks != of_ranks[0]).any(0).tolist()
        names = [name or "the model" for name, odd in zip(uses, differs, strict=True) if odd]
        what = listed(names) or "modules in another order"
        raise ConfigError(
            f"the ranks did not use the same weights before step {step.number + 1}, so the "
            f"weights of different modules are mixed up: some ranks alone used {what}; "
            f"{self._run.config.parallel.choice} gathers weights on all ranks together: set "
            "parallel.conditional to their names, such as experts.*, to keep them whole on each "
            "rank, or choose parallel.strategy=ddp or zero1, and start again"
        )
