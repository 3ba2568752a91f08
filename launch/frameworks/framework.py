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
        blocks: nodes in a row with equal numbers of ranks: the first, how many, and the ranks.
        store: connects to a store that all ranks share.
        addresses: exchanges with all other ranks, which must call it too, one `host:port` per rank
            that other hosts can dial; the port is free at that moment.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    nodes: int
    blocks: Sequence[tuple[int, int, int]]
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
            local_world_size=(own := int(env["LOCAL_WORLD_SIZE"])),
            node=int(env["GROUP_RANK"]),
            nodes=(nodes := int(env["GROUP_WORLD_SIZE"])),
            blocks=_blocks(ranks or [own] * nodes),
            store=store,
            addresses=addresses,
        )


def _blocks(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    groups = [[*group] for _, group in groupby(enumerate(ranks), key=lambda node: node[1])]
    return [(group[0][0], len(group), group[0][1]) for group in groups]


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
