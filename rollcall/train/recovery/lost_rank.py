"""Train on in the other ranks when one is lost, with the state that they have in memory.

A rank that loses a peer unwinds to `training.train` with its newest state, and builds all parts
again for the ranks that are left, as after a restart. It does so once more when a spare process
comes in the place of the lost rank, which gets the state from a peer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from rollcall.config import Config
from rollcall.train.checkpoint.read import put
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.checkpoint.write_plan import chunks
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.members import Members
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World
from rollcall.train.state import TrainingState


@dataclass
class Kept:
    """The state of a rank in memory, and the facts that a checkpoint of its step would have."""

    step: int = -1  # -1 if it has none
    state: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] | None = None


class GoOn(Exception):
    """Ends a training whose ranks go on in another group; `words` as in `Members.meet`."""

    def __init__(self, kept: Kept, words: int) -> None:
        super().__init__()
        self.kept, self.words = kept, words
        self.config: Config | None = None  # of the run


class Back(Exception):
    """Ends the steps, on all ranks together, because a lost rank is back."""

    def __init__(self, words: int) -> None:
        super().__init__(f"a lost rank is back, by {words} words of the log")
        self.words = words


@dataclass(frozen=True)
class Words:
    """The number of words in the log, of the first rank, if there are new ones; otherwise 0."""

    count: float


class Absent:
    """The member of the step that looks whether a lost rank is back."""

    def __init__(self, world: World, members: Members, state: TrainingState, saver: Saver) -> None:
        self._world, self._members, self._state, self._saver = world, members, state, saver
        self._is_ready = False

    @classmethod
    def of(cls, run: Run, state: TrainingState, saver: Saver) -> Self | None:
        """Return the member, if the run wants to go on without a rank that is lost."""
        members = run.world.members
        if members is None or run.config.faults.on_lost_rank == "restart":
            return None
        return cls(run.world, members, state, saver)

    def begin(self) -> None:
        """Note that a step has ended: from now on, ranks can go on."""
        if self._is_ready or self._state.has_objects:  # which a new process would not have
            return
        if self._world.is_main:
            self._members.get_ready(True)
        self._is_ready = True

    def end(self) -> None:
        """Note that the steps have ended, after which a lost rank ends the others."""
        if self._is_ready and self._world.is_main:
            self._members.get_ready(False)
        self._is_ready = False

    def may_go_on(self, is_lost: bool, words: int) -> bool:
        """Return True if the ranks go on without a lost one, or with one that is back."""
        try:
            return words > 0 or (is_lost and self._is_ready and self._members.is_lost())
        except dist.DistError:  # the node with the store is lost
            return False

    def report(self) -> Words:
        """Look into the log."""
        count = len(self._members.log()) if self._world.is_main else 0
        return Words(float(count) if count > self._members.words else 0.0)

    def settle(self, step: Step, agreed: Words) -> Action:
        """End the steps if a rank is back, unless a save is in flight; it can wait for that."""
        if agreed.count and not step.is_skipped and not self._saver.is_busy:
            raise Back(int(agreed.count))
        return Action.CONTINUE


def hand_over(kept: Kept, state: TrainingState, world: World) -> tuple[int, Mapping[str, Any]]:
    """Give all ranks the newest state that one has kept; return its step and facts."""
    steps = world.gather(torch.tensor([kept.step])).flatten().tolist()
    newest, is_ours = max(steps), kept.step == max(steps)
    if newest < 0:
        raise RuntimeError("no rank has kept a whole state, so all restart from the checkpoint")
    filled = state.read_alone()
    tensors, values = chunks(filled)
    if is_ours and kept.state is not None:
        theirs, own_values = chunks(dict(kept.state))
        parts = {(chunk.key, chunk.offset): part for chunk, part in theirs}
        for chunk, part in tensors:
            part.copy_(parts[chunk.key, chunk.offset])
        values, kept.state = own_values, None  # it would need memory until the end
    source, is_lacking = steps.index(newest), min(steps) < newest
    if is_lacking:
        for _, part in tensors:
            whole = part.contiguous()
            dist.broadcast(whole, source)
            part.copy_(whole)
        values = [(tuple(key), value) for key, value in world.broadcast(values, source)]
    for key, value in values:
        put(filled, key, value)
    state.load(filled, newest)
    return newest, world.broadcast(kept.facts, source)
