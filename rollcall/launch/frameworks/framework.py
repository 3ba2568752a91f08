"""A framework as rollcall sees it, and the context in which it starts a rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol


class KeyValueStore(Protocol):
    """A key-value store that all ranks can read and write, such as torch's."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value and return it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Return True if all these keys have values."""


class RankContext:
    """The position of a rank among all ranks, and the means to reach the others."""

    def __init__(
        self,
        env: Mapping[str, str],
        store: Callable[[], KeyValueStore],
        addresses: Callable[[], Sequence[str]],
        ranks: Sequence[int] = (),
        roles: Sequence[str] = (),
    ) -> None:
        """Read torchrun's variables; `ranks` has the number per node, empty if all are equal."""
        self.rank, self.local_rank = int(env["RANK"]), int(env["LOCAL_RANK"])
        self.world_size = int(env["WORLD_SIZE"])
        self.local_world_size = int(env["LOCAL_WORLD_SIZE"])
        self.node, self.nodes = int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"])
        self.store = store  # connects to a store that all ranks share
        # Exchanges one `host:port` per rank that other hosts can dial, with a port that is free at
        # that moment; all ranks must call it.
        self.addresses = addresses
        self.roles = roles  # of each rank; empty if all do the same
        counts = enumerate(ranks or [self.local_world_size] * self.nodes)
        groups = ([*group] for _, group in groupby(counts, key=itemgetter(1)))
        # Consecutive nodes with the same number of ranks: first node, number of nodes, ranks each.
        self.blocks = [(group[0][0], len(group), group[0][1]) for group in groups]


@dataclass(frozen=True)
class Framework:
    """A framework whose scripts rollcall starts."""

    imports: frozenset[str]  # packages whose import shows that a script uses it
    variables: Callable[[RankContext], Mapping[str, object]]  # of a rank, in addition to torchrun's
    # Ranks meet at MASTER_ADDR and MASTER_PORT, so rollcall can tell whether they did.
    meets_at_master: bool = False
