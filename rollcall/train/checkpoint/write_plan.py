"""The share of the state that each rank writes, so that each chunk of a tensor is written once.

DCP lists the chunks. One small collective, repeated only after a change, finds ranks that hold the
same chunk. Every rank computes the rest for itself, so no plan is sent.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from rollcall.config import ConfigError
from rollcall.train.checkpoint.contents import ITEM_SIZES, OBJECTS, Chunk, Key, dotted
from rollcall.train.checkpoint.read import view
from rollcall.train.ranks.world import World

CHUNK_BYTES = 2**24
"""A tensor is cut into whole rows of about this size. A reader has to read a whole chunk to check
it, and the replicas of a large tensor share the work of writing its chunks."""
Tensors = list[tuple[Chunk, torch.Tensor]]
Values = list[tuple[Key, Any]]


class WritePlan:
    """Divides the state among the ranks, and reuses the plan while the state keeps its form."""

    def __init__(self, world: World, nodes: Sequence[int] = ()) -> None:
        """Take a number for each rank's node if each node writes all that its ranks hold."""
        # Ids of the chunks and values that this rank copies; all copies make up the state once.
        self.copied: frozenset[int] = frozenset()
        self.held = 0  # a number for all tensors that the ranks of this node hold
        self.group_of: dict[int, int] = {}  # a number for the ranks that hold a chunk or value
        self.groups = 0  # such sets of ranks; 0 if a rank holds anything alone
        self.is_first = False  # this rank is the first of each set that it belongs to
        self._world = world
        self._nodes = nodes
        self._form: bytes | None = None
        self._written: frozenset[int] = frozenset()

    def share(self, state: dict[str, Any]) -> tuple[Tensors, Values]:
        """Return the share of this rank; all ranks call it. Raise ConfigError as `chunks` does."""
        tensors, values = chunks(state)
        sizes = {identify(chunk.key, chunk.offset): tensor.nbytes for chunk, tensor in tensors}
        sizes |= {identify(key): 1 for key, _ in values}
        form = hashlib.blake2b(repr(sizes).encode()).digest()
        # A new form on any rank changes which ranks hold a chunk.
        maxima = torch.tensor([len(sizes), form != self._form])
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        if maxima[1]:
            self._form = form
            held = torch.zeros(int(maxima[0]), 2, dtype=torch.int64)
            held[: len(sizes)] = torch.tensor(list(sizes.items()), dtype=torch.int64).view(-1, 2)
            rows = self._world.gather(held).tolist()
            self.held = self._number(tensors)
            by_rank = [dict(pair for pair in pairs if pair != [0, 0]) for pairs in rows]
            self._group(by_rank)
            shares = divide(by_rank, self._nodes)
            self._written = self.copied = frozenset(shares[self._world.rank])
            if self._nodes:
                # Only what a rank writes is divided again, so that each rank copies its own file.
                both = zip(by_rank, shares, strict=True)
                written = [{chunk: size_of[chunk] for chunk in share} for size_of, share in both]
                self.copied = frozenset(divide(written)[self._world.rank])
        return _chosen(tensors, values, lambda number: number in self._written)

    def _group(self, held: Sequence[Mapping[int, int]]) -> None:
        holders: dict[int, tuple[int, ...]] = {}
        for rank, chunks_of_rank in enumerate(held):
            holders |= {chunk: (*holders.get(chunk, ()), rank) for chunk in chunks_of_rank}
        mine = {chunk: holders[chunk] for chunk in held[self._world.rank]}
        self.group_of = {chunk: identify(ranks) for chunk, ranks in mine.items()}
        self.is_first = all(ranks[0] == self._world.rank for ranks in mine.values())
        is_spread = all(len(ranks) > 1 for ranks in holders.values())
        self.groups = len({*holders.values(), (*range(len(held)),)}) if is_spread else 0

    def taken(self, state: dict[str, Any], take: Callable[[int], bool]) -> tuple[Tensors, Values]:
        """Return the share that this rank can take alone; what is not planned, all ranks hold."""
        tensors, values = chunks(state)
        everyone = identify(tuple(range(self._world.world_size)))
        groups = {group for group in {everyone, *self.group_of.values()} if take(group)}
        return _chosen(tensors, values, lambda n: self.group_of.get(n, everyone) in groups)

    def of_node(self, state: dict[str, Any]) -> int:
        """Return `held` for a state; all ranks call it together."""
        self.share(state)
        return self.held

    def _number(self, tensors: Tensors) -> int:
        """Return a number for the tensors of this rank's node; what users' objects hold varies."""
        names = sorted((chunk.key, chunk.offset) for chunk, _ in tensors if chunk.key[0] != OBJECTS)
        numbers = self._world.gather(torch.tensor([identify(tuple(names))])).flatten().tolist()
        nodes = self._nodes or [0] * len(numbers)
        pairs, mine = zip(numbers, nodes, strict=True), nodes[self._world.rank]
        return identify((*sorted({number for number, node in pairs if node == mine}),))


def _chosen(
    tensors: Tensors, values: Values, is_chosen: Callable[[int], bool]
) -> tuple[Tensors, Values]:
    parts = [part for part in tensors if is_chosen(identify(part[0].key, part[0].offset))]
    return parts, [value for value in values if is_chosen(identify(value[0]))]


def chunks(state: dict[str, Any]) -> tuple[Tensors, Values]:
    """Return the chunks and plain values that this rank holds; ConfigError for anything else."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    tensors: Tensors = []
    values: Values = []
    for item in planner.create_local_plan().items:
        key = planner.mappings[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            values.append((key, _checked(key, planner.lookup_object(item.index))))
            continue
        data = item.tensor_data
        assert data is not None and data.chunk is not None, "every tensor has them"
        kind = str(data.properties.dtype).removeprefix("torch.")
        if kind not in ITEM_SIZES:
            raise ConfigError(f"{dotted(key)} is a tensor of {kind}, which checkpoints cannot hold")
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        whole, offset = tuple(data.size), tuple(data.chunk.offsets)
        if tensor.numel() or not math.prod(whole):
            for row, part in _cut(tensor.detach()):
                first = (offset[0] + row, *offset[1:]) if offset else ()
                tensors.append((Chunk(key, kind, whole, first, tuple(part.shape)), part))
    return tensors, values


def differs(state: dict[str, Any], world: World) -> bool:
    """Return True on all ranks if a state without global names is not the same on all of them."""
    tensors, values = chunks(state)
    digest = hashlib.blake2b(repr(values).encode(), digest_size=7)
    for _, tensor in tensors:
        digest.update(view(tensor.detach().cpu().contiguous()))
    number = torch.tensor([int.from_bytes(digest.digest(), "big")])
    return len({*world.gather(number).flatten().tolist()}) > 1


def divide(held: Sequence[Mapping[int, int]], nodes: Sequence[int] = ()) -> list[list[int]]:
    """Return the chunks of each rank: each goes to its holder with the least so far, large first.

    `held` has for each rank the bytes of the chunks it holds, by id. With a number for each rank's
    node, each node writes all that its ranks hold.
    """
    sizes: dict[int, int] = {}
    holders: dict[tuple[int, int], list[int]] = {}  # ranks, by chunk and node
    for rank, sizes_of_rank in enumerate(held):
        sizes.update(sizes_of_rank)
        for chunk in sizes_of_rank:
            holders.setdefault((chunk, nodes[rank] if nodes else 0), []).append(rank)
    shares: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    # Chunks with one holder come first, because they leave no choice.
    for copy in sorted(holders, key=lambda copy: (len(holders[copy]) > 1, -sizes[copy[0]], copy)):
        chunk = copy[0]
        writer = min(holders[copy], key=lambda rank: (loads[rank], rank))
        shares[writer].append(chunk)
        loads[writer] += sizes[chunk]
    return shares


def identify(key: tuple[object, ...], offset: tuple[int, ...] = ()) -> int:
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
            advice = "a checkpoint can hold tensors, numbers, texts and lists of them"
            raise ConfigError(f"{dotted(key)} is a {type(part).__name__}; {advice}")
    return value
