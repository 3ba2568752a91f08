"""Hand the state over that ranks have kept in memory while they formed another group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rollcall.train.checkpoint.read import put
from rollcall.train.checkpoint.write_plan import chunks
from rollcall.train.ranks.world import World
from rollcall.train.state import TrainingState


@dataclass
class Kept:
    """The state of a rank in memory, and the facts that a checkpoint of its step would have."""

    step: int = -1  # -1 if it has none
    state: dict[str, Any] | None = None
    facts: Mapping[str, Any] | None = None


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
        values = world.broadcast(values, source)
    for key, value in values:
        put(filled, key, value)
    state.load(filled, newest)
    return newest, world.broadcast(kept.facts, source)
