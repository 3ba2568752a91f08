"""A framework as rollcall sees it, and the place of a rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, Self


class Store(Protocol):
    """A store that all ranks can read and write, such as torch's."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value, and return it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these values exist."""


@dataclass(frozen=True)
class Place:
    """A rank's place among all ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    nodes: int
    # Nodes in a row with equal numbers of ranks: the first, how many, and the ranks.
    blocks: Sequence[tuple[int, int, int]]
    store: Callable[[], Store]  # connects to a store that all ranks share
    # Exchanges one `host:port` per rank that other hosts can dial, with a port that is free at that
    # moment; all ranks must call it.
    addresses: Callable[[], Sequence[str]]

    @classmethod
    def of(
        cls,
        env: Mapping[str, str],
        store: Callable[[], Store],
        addresses: Callable[[], Sequence[str]],
        ranks: Sequence[int] = (),
    ) -> Self:
        """Read a place from torchrun's variables; without `ranks`, all nodes have the same."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        rank, local, size, local_size, node = (int(env[name]) for name in names)
        nodes = int(env["GROUP_WORLD_SIZE"])
        counts = enumerate(ranks or [local_size] * nodes)
        groups = ([*group] for _, group in groupby(counts, key=lambda each: each[1]))
        blocks = [(group[0][0], len(group), group[0][1]) for group in groups]
        return cls(rank, local, size, local_size, node, nodes, blocks, store, addresses)


@dataclass(frozen=True)
class Framework:
    """A framework whose scripts rollcall starts."""

    imports: frozenset[str]  # top-level packages whose import shows that a script uses it
    variables: Callable[[Place], Mapping[str, object]]  # of a rank, in addition to torchrun's
    # Whether ranks meet at MASTER_ADDR and MASTER_PORT, so that it is known whether they did.
    meets_at_master: bool = False
