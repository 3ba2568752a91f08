"""Train on without a rank that is lost, with the state that the others have in memory.

They unwind to `training.train` and build all parts again, and once more when the rank is back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rollcall.config import Config
from rollcall.train.checkpoint.contents import OBJECTS
from rollcall.train.checkpoint.read import put
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.checkpoint.write_plan import chunks
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.members import READY
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World
from rollcall.train.state import TrainingState


@dataclass
class Kept:
    """The state of a rank in memory, and the facts that a checkpoint of its step would have."""

    step: int = -1  # -1 if it has none
    state: dict[str, Any] | None = None
    facts: Mapping[str, Any] | None = None


class GoOn(Exception):
    """Ends a training whose ranks go on in another group, by so many words (`Members.meet`)."""

    def __init__(self, words: int = 0) -> None:
        super().__init__("a lost rank is back")
        self.words, self.kept = words, Kept()
        self.config: Config | None = None  # of the run


class Absent:
    """The member of the step that looks whether a lost rank is back; without a store it is off."""

    def __init__(self, run: Run, state: TrainingState, saver: Saver) -> None:
        self._members, self._is_main = run.world.members, run.world.is_main
        self._state, self._saver = state, saver
        self._is_ready: bool | None = None  # None before the first step

    def begin(self) -> None:
        """Note that a step has ended: from now on, ranks can go on without one."""
        if self._members and self._is_ready is None:
            # Another process would not have the state of objects.
            self._is_ready = OBJECTS not in self._state.read_alone()
            if self._is_ready and self._is_main:
                self._members.store.set(READY, "")

    def end(self) -> None:
        """Note that the steps have ended, after which a lost rank ends the others."""
        if self._members and self._is_ready and self._is_main:
            self._members.store.delete_key(READY)
        self._is_ready = False

    def may_go_on(self) -> bool:
        """Return True if the parents of the ranks say so, after one was lost."""
        try:
            return bool(self._members and self._is_ready and self._members.is_lost())
        except dist.DistError:  # the node with the store is lost
            return False

    def report(self) -> dict[str, float]:
        """Return the number of words in the log, on rank 0 and if there are new ones."""
        count = len(self._members.read()) if self._members and self._is_main else 0
        return {"words": count if self._members and count > self._members.words else 0}

    def settle(self, step: Step, agreed: dict[str, float]) -> Action:
        """End the steps if a rank is back; it can wait for a save in flight."""
        if agreed["words"] and not step.is_skipped and not self._saver.checkpoints.busy:
            raise GoOn(int(agreed["words"]))
        return Action.CONTINUE


def hand_over(kept: Kept, state: TrainingState, world: World) -> tuple[int, Mapping[str, Any]]:
    """Give all ranks the newest state that one has kept; return its step and facts."""
    steps = world.gather(torch.tensor([kept.step])).flatten().tolist()
    newest = max(steps)
    if newest < 0:
        raise RuntimeError("no rank has kept a whole state, so all restart from the checkpoint")
    source, filled = steps.index(newest), state.read_alone()
    tensors, values = chunks(filled)
    if kept.step == newest and kept.state is not None:
        theirs, values = chunks(kept.state)
        parts = {(chunk.key, chunk.offset): part for chunk, part in theirs}
        for chunk, part in tensors:
            part.copy_(parts[chunk.key, chunk.offset])
        kept.state = None  # it would need memory until the end
    if min(steps) < newest:
        for _, part in tensors:
            whole = part.contiguous()
            dist.broadcast(whole, source)
            part.copy_(whole)
        values = [(tuple(key), value) for key, value in world.broadcast(values, source)]
    for key, value in values:
        put(filled, key, value)
    state.load(filled, newest)
    return newest, world.broadcast(kept.facts, source)
