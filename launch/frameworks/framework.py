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
    """A rank's place among all ranks.

    Attributes:
        ranks: how many ranks each node has.
        store: connects to a store that all ranks share.
        addresses: exchanges with all other ranks, which must call it too, one `host:port` per rank
            that other hosts can dial; the port is free at that moment.
    """

    rank: int
    local_rank: int
    world_size: int
    node: int
    ranks: Sequence[int]
    store: Callable[[], Store]
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
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            node=int(env["GROUP_RANK"]),
            ranks=ranks or [int(env["LOCAL_WORLD_SIZE"])] * int(env["GROUP_WORLD_SIZE"]),
            store=store,
            addresses=addresses,
        )

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.ranks)

    @property
    def local_world_size(self) -> int:
        """How many ranks this node has."""
        return self.ranks[self.node]

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Neighbours with equally many ranks: the first node, how many nodes, and the ranks."""
        found, first = [], 0
        for ranks, group in groupby(self.ranks):
            found.append((first, nodes := len(list(group)), ranks))
            first += nodes
        return found


@dataclass(frozen=True)
class Framework:
    """A framework whose scripts rollcall starts.

    Attributes:
        imports: top-level packages whose import shows that a script uses it.
        variables: returns what a rank's environment has in addition to torchrun's variables.
        meets_at_master: whether its ranks meet at MASTER_ADDR and MASTER_PORT, so that it is known
            whether they did.
    """

    imports: frozenset[str]
    variables: Callable[[Place], dict[str, str]]
    meets_at_master: bool = False
