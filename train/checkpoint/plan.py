"""Which rank writes what? DCP names the boxes of every tensor; each box is written once.

Ranks that hold the same box are found by one small collective, and only when something changed
since the last save. The rest is a function that every rank computes for itself, so no plan travels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from train.checkpoint.manifest import ITEM_SIZES, Key, dotted
from train.checkpoint.write import Box
from train.config import ConfigError
from train.world import World

# A box is cut into whole rows of about so many bytes: what a reader must read to check a digest,
# and what makes replicas of one large tensor share the work of writing it.
PIECE = 2**24
Tensors = list[tuple[Box, torch.Tensor]]
Values = list[tuple[Key, Any]]


class Plan:
    """Divides the state over the ranks, and remembers how as long as the state keeps its form.

    Attributes:
        once: what this rank writes of the state where it is written once, and not once per node.
    """

    def __init__(self, world: World, nodes: Sequence[int] = ()) -> None:
        """Nothing is known of the state yet.

        Args:
            nodes: the node of each rank, where every node writes what its ranks hold.
        """
        self.once: frozenset[int] = frozenset()
        self._world = world
        self._nodes = nodes
        self._form: bytes | None = None
        self._mine: frozenset[int] = frozenset()

    def mine(self, state: dict[str, Any]) -> tuple[Tensors, Values]:
        """What this rank writes of the state; every rank must call it together.

        Raises:
            ConfigError: the state holds something that is neither a tensor nor a plain value.
        """
        tensors, values = boxes(state)
        sizes = {number(box.key, box.offset): tensor.nbytes for box, tensor in tensors}
        sizes |= {number(key): 1 for key, _ in values}
        form = hashlib.blake2b(repr(sizes).encode()).digest()
        # Another form on any rank changes who holds what.
        most = torch.tensor([len(sizes), form != self._form])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most[1]:
            self._form = form
            held = _gather(sizes, int(most[0]))
            shares = divide(held, self._nodes)
            self._mine = self.once = frozenset(shares[self._world.rank])
            if self._nodes:
                # Of what the nodes write: so each rank finds in its own file what it is to copy.
                written = [
                    {box: boxes[box] for box in share}
                    for boxes, share in zip(held, shares, strict=True)
                ]
                self.once = frozenset(divide(written)[self._world.rank])
        return (
            [item for item in tensors if number(item[0].key, item[0].offset) in self._mine],
            [item for item in values if number(item[0]) in self._mine],
        )


def boxes(state: dict[str, Any]) -> tuple[Tensors, Values]:
    """The boxes of the tensors that this rank holds, in pieces, and the plain values.

    Raises:
        ConfigError: the state holds something else.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    tensors: Tensors = []
    values: Values = []
    for item in planner.create_local_plan().items:
        key = planner.mappings[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            value = planner.lookup_object(item.index)
            _check(key, value)
            values.append((key, value))
            continue
        about = item.tensor_data
        assert about is not None and about.chunk is not None  # as of every tensor
        dtype = str(about.properties.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZES:
            raise ConfigError(
                f"{dotted(key)} is a tensor of {dtype}, which checkpoints cannot hold"
            )
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        whole, offset = tuple(about.size), tuple(about.chunk.offsets)
        if tensor.numel() or not math.prod(whole):
            for start, part in _cut(tensor.detach()):
                place = (offset[0] + start, *offset[1:]) if offset else ()
                tensors.append((Box(key, dtype, whole, place, tuple(part.shape)), part))
    return tensors, values


def divide(held: Sequence[Mapping[int, int]], nodes: Sequence[int] = ()) -> list[list[int]]:
    """Who writes which box: each goes to the holder with the least to write, large ones first.

    Args:
        held: the sizes of the boxes that each rank holds.
        nodes: the node of each rank, if each node is to write what its ranks hold.
    """
    sizes: dict[int, int] = {}
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, boxes in enumerate(held):
        sizes.update(boxes)
        for box in boxes:
            holders.setdefault((box, nodes[rank] if nodes else 0), []).append(rank)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)

    def order(place: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
        # Those with one holder first: they leave no choice.
        return len(holders[place]) > 1, -sizes[place[0]], place

    for place in sorted(holders, key=order):
        box = place[0]
        writer = min(holders[place], key=lambda rank: (loads[rank], rank))
        shares[writer].append(box)
        loads[writer] += sizes[box]
    return shares


def _cut(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    if tensor.nbytes <= PIECE or tensor.dim() == 0:
        yield 0, tensor
        return
    rows = max(1, PIECE * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), rows):
        yield start, tensor[start : start + rows]


def number(key: Key, offset: tuple[int, ...] = ()) -> int:
    """A box or a value as one number, equal on all ranks; 64 bits do not meet by chance."""
    digest = hashlib.blake2b(repr((key, offset)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _gather(sizes: Mapping[int, int], most: int) -> list[dict[int, int]]:
    mine = torch.zeros(most, 2, dtype=torch.int64)
    mine[: len(sizes)] = torch.tensor(list(sizes.items()), dtype=torch.int64).view(-1, 2)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [dict(pair for pair in rank.tolist() if pair != [0, 0]) for rank in every]


def _check(key: Key, value: Any) -> None:
    for part in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(part, bool | int | float | str | None):
            raise ConfigError(
                f"{dotted(key)} is a {type(part).__name__}; checkpoints hold tensors, numbers, "
                "texts and lists of them"
            )
