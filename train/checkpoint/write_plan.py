"""Which rank writes what? DCP lists the chunks of every tensor; each chunk is written once.

One small collective, and only after a change, finds ranks that hold the same chunk. Every rank
computes the rest for itself, so no plan is sent.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from rollcall.config import ConfigError
from rollcall.train.checkpoint.contents import ITEM_SIZES, Key, dotted
from rollcall.train.checkpoint.write import Chunk
from rollcall.train.dist.world import World

CHUNK_BYTES = 2**24
"""A tensor is cut into whole rows of about this size: the least that a reader must read to check
it, and what lets replicas of one large tensor share the work of writing it."""
Tensors = list[tuple[Chunk, torch.Tensor]]
Values = list[tuple[Key, Any]]


class WritePlan:
    """Divides the state among the ranks, and reuses the plan while the state keeps its form."""

    def __init__(self, world: World, nodes: Sequence[int] = ()) -> None:
        """Take each rank's node, if each node writes all that its ranks hold."""
        # Ids of what this rank copies, so that all copies make up the state once.
        self.copied: frozenset[int] = frozenset()
        self._world = world
        self._nodes = nodes
        self._form: bytes | None = None
        self._own: frozenset[int] = frozenset()

    def share(self, state: dict[str, Any]) -> tuple[Tensors, Values]:
        """Return what this rank writes; all ranks call it together. It raises as `chunks` does."""
        tensors, values = chunks(state)
        sizes = {identify(chunk.key, chunk.offset): tensor.nbytes for chunk, tensor in tensors}
        sizes |= {identify(key): 1 for key, _ in values}
        form = hashlib.blake2b(repr(sizes).encode()).digest()
        # A new form on any rank changes who holds what.
        most = torch.tensor([len(sizes), form != self._form])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most[1]:
            self._form = form
            held = torch.zeros(int(most[0]), 2, dtype=torch.int64)
            held[: len(sizes)] = torch.tensor(list(sizes.items()), dtype=torch.int64).view(-1, 2)
            every = self._world.gather(held).tolist()
            self._divide([dict(pair for pair in rank if pair != [0, 0]) for rank in every])
        return (
            [item for item in tensors if identify(item[0].key, item[0].offset) in self._own],
            [item for item in values if identify(item[0]) in self._own],
        )

    def _divide(self, held: list[dict[int, int]]) -> None:
        shares = divide(held, self._nodes)
        self._own = self.copied = frozenset(shares[self._world.rank])
        if self._nodes:
            # Among what the nodes write, so that each rank copies from its own file.
            written = [
                {chunk: sizes[chunk] for chunk in share}
                for sizes, share in zip(held, shares, strict=True)
            ]
            self.copied = frozenset(divide(written)[self._world.rank])


def chunks(state: dict[str, Any]) -> tuple[Tensors, Values]:
    """Return the chunks that this rank holds, and plain values; ConfigError for anything else."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    tensors: Tensors = []
    values: Values = []
    for item in planner.create_local_plan().items:
        key = planner.mappings[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            values.append((key, _checked(key, planner.lookup_object(item.index))))
            continue
        about = item.tensor_data
        assert about is not None and about.chunk is not None, "every tensor has them"
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
                tensors.append((Chunk(key, dtype, whole, place, tuple(part.shape)), part))
    return tensors, values


def divide(held: Sequence[Mapping[int, int]], nodes: Sequence[int] = ()) -> list[list[int]]:
    """Give each chunk to the holder with the least to write so far, large chunks first.

    Args:
        held: for each rank, the bytes of the chunks it holds, by id.
        nodes: each rank's node, if each node must write all that its ranks hold.
    """
    sizes: dict[int, int] = {}
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, own in enumerate(held):
        sizes.update(own)
        for chunk in own:
            holders.setdefault((chunk, nodes[rank] if nodes else 0), []).append(rank)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)

    def order(place: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
        # Chunks with one holder come first, because they leave no choice.
        return len(holders[place]) > 1, -sizes[place[0]], place

    for place in sorted(holders, key=order):
        chunk = place[0]
        writer = min(holders[place], key=lambda rank: (loads[rank], rank))
        shares[writer].append(chunk)
        loads[writer] += sizes[chunk]
    return shares


def identify(key: Key, offset: tuple[int, ...] = ()) -> int:
    """Return the id of a chunk or a value, equal on all ranks; 64 bits make collisions unlikely."""
    digest = hashlib.blake2b(repr((key, offset)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _cut(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    if tensor.nbytes <= CHUNK_BYTES or tensor.dim() == 0:
        yield 0, tensor
        return
    rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
    for start in range(0, len(tensor), rows):
        yield start, tensor[start : start + rows]


def _checked(key: Key, value: Any) -> Any:
    for part in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(part, bool | int | float | str | None):
            raise ConfigError(
                f"{dotted(key)} is a {type(part).__name__}; a checkpoint can hold tensors, "
                "numbers, texts and lists of them"
            )
    return value
