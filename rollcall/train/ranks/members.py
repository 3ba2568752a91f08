"""The ranks that take part, while some are lost and come back: `faults.on_lost_rank=continue`.

A log in the store of the ranks' parents says it. The parent of rank 3 adds -3 if it is lost. The
spare process in its place asks to come back, and rank 0 adds +3 at the end of a step. Each time,
the ranks that take part by then form a new group.
"""

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PREFIX, LOG, BACK, OVER = "rollcall/members", "log", "back", "over"
"""Beginning of the keys; keys of the log, of ranks that are back, and of the end of this."""
SPARES, REPLACES = "ROLLCALL_SPARES", "ROLLCALL_REPLACES"
"""Variables of a rank whose node has spare processes, and of one that was one."""
PATIENCE, FORM = 60.0, timedelta(seconds=15)
"""The time that ranks wait for each other, and for a group to form once all have come."""


def lose(store: Any, rank: int, size: int) -> bool:
    """Write into the log that a rank is lost; return whether others are left to continue."""
    try:
        store.append(LOG, f"-{rank} ")
        return bool(_left(store.get(LOG).decode().split(), size))
    except RuntimeError:  # node 0, which has the store, has ended
        return False


def _left(log: list[str], size: int) -> list[int]:
    newest = {word[1:]: word[0] for word in log}
    return [rank for rank in range(size) if newest.get(str(rank)) != "-"]


class Members:
    """The ranks that take part, as one of them sees it; its number here never changes."""

    def __init__(self, rank: int, size: int) -> None:
        self._words, self._ranks = 0, [*range(size)]  # of the log, of the group formed by them
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = dist.PrefixStore(PREFIX, dist.TCPStore(*address, is_master=False))
        self._rank, self._size, self._store = rank, size, store
        if REPLACES in os.environ:
            store.append(BACK, f"{rank} ")

    def _read(self, key: str = LOG) -> list[str]:
        return self._store.get(key).decode().split() if self._store.check([key]) else []

    def back(self) -> list[str]:
        """Return the ranks that ask to come back."""
        admitted = [word for word in self._read() if word[0] == "+"]
        return self._read(BACK)[len(admitted) :]

    def let_in(self) -> None:
        """Let them take part; rank 0 calls it, when all ranks end their steps."""
        self._store.append(LOG, "".join(f"+{rank} " for rank in self.back()))

    def is_lost(self) -> bool:
        """Wait until the log has grown; return False if all ranks start again."""
        try:
            return self._wait(self._has_grown)
        except dist.DistError:  # the node with the store is lost
            return False

    def meet(self) -> dict[str, Any]:
        """Form the next group; return the rank and world_size in it, or raise RuntimeError."""
        while self._wait(self._takes_part, math.inf):
            self._store.add(f"at {self._words}", 1)
            if not self._wait(self._have_come):
                break
            if self._has_grown():
                continue
            store = dist.PrefixStore(f"{self._words}", self._store)
            rank, size = self._ranks.index(self._rank), len(self._ranks)
            group: dict[str, Any] = {"rank": rank, "world_size": size}
            try:
                dist.init_process_group("gloo", store=store, timeout=FORM, **group)
                return group
            except RuntimeError:
                if not self.is_lost():
                    raise
        raise RuntimeError("Wait timeout: not all of the ranks that are left came")

    def _has_grown(self) -> bool:
        return len(self._read()) > self._words

    def _takes_part(self) -> bool:
        log = self._read()
        has_grown, self._words, self._ranks = (
            len(log) > self._words,
            len(log),
            _left(log, self._size),
        )
        return has_grown and self._rank in self._ranks

    def _have_come(self) -> bool:
        count = self._store.add(f"at {self._words}", 0)
        return bool(count == len(self._ranks)) or self._has_grown()

    def _wait(self, is_true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end or self._store.check([OVER]):
                return False
            time.sleep(0.002)
        return True
