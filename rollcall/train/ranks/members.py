"""The ranks that take part, while some are lost and come back: `faults.on_lost_rank=continue`.

The parents of the ranks write a log to the store at which the ranks meet: -3 if rank 3 is lost, +3
if a spare process has taken its place. Its first words, however many, say who takes part. Ranks
that lose a peer form a group by the words up to the newest loss; a rank that is back waits until
the others choose to go further, which they do together at the end of a step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from rollcall.train.ranks.world import Place

PREFIX = "rollcall/members"
LOG, OVER, READY = "log", "over", "ready"
"""Keys: the log; set if nobody takes a rank's place any more; set while ranks could go on."""
CHOSEN = "chosen"
"""The key of the numbers of words by which groups were formed, or nearly."""
SPARES, REPLACES = "ROLLCALL_SPARES", "ROLLCALL_REPLACES"
"""Variables of a rank: how many spare processes its node began with; set in one that was spare."""
LOOK = 0.002
"""Seconds between two looks at the store."""
PATIENCE, FORM = timedelta(seconds=60), timedelta(seconds=15)
"""The time that ranks wait for each other, and for a group to form of those that have come."""


class Members:
    """Who takes part, as this rank sees it; it keeps the number that it had at the start."""

    def __init__(self, place: Place) -> None:
        self._place = place
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        server = dist.TCPStore(*address, is_master=False, timeout=PATIENCE, wait_for_workers=False)
        self._store = dist.PrefixStore(PREFIX, server)
        self.words = 0  # of the log, by which the present group was formed

    def get_ready(self, is_ready: bool) -> None:
        """Tell the parents whether the ranks could train on without one of them."""
        if is_ready:
            self._store.set(READY, "")
        else:
            self._store.delete_key(READY)

    def log(self) -> list[str]:
        """Return the words of the log."""
        return self._words(LOG)

    def _words(self, key: str) -> list[str]:
        return self._store.get(key).decode().split() if self._store.check([key]) else []

    def of(self, words: int) -> list[int]:
        """Return the ranks that take part by the first words of the log."""
        ranks = set(range(self._place.world_size))
        for word in self.log()[:words]:
            ranks ^= {abs(int(word))}
        return sorted(ranks)

    def is_lost(self) -> bool:
        """Wait until the parents say who is lost; return False if all ranks start again."""
        return self._wait(lambda: self._newest_loss() > self.words)

    def come_back(self) -> None:
        """Write this rank into the log, as the process that takes the place of a lost one."""
        self._store.append(LOG, f"+{self._place.rank} ")  # type: ignore[attr-defined]

    def meet(self, words: int = 0) -> Place:
        """Form the group by so many words of the log, or more; return this rank's place in it.

        Raises:
            RuntimeError: the others did not come.
        """
        self.words = words
        while True:
            if not self._wait(self._takes_part, math.inf):
                raise RuntimeError(
                    "Wait timeout: the ranks do not go on without those that are lost"
                )
            words, ranks = self.words, self.of(self.words)
            self._store.append(CHOSEN, f"{words} ")  # type: ignore[attr-defined]
            self._store.add(f"at {words}", 1)
            if not self._wait(partial(self._has_come, words, len(ranks))):
                raise RuntimeError("Wait timeout: not all of the other ranks came")
            if self._newest_choice() > words:
                continue
            place = replace(self._place, rank=ranks.index(self._place.rank), world_size=len(ranks))
            group: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
            store = dist.PrefixStore(f"{words}", self._store)
            try:
                dist.init_process_group("gloo", store=store, timeout=FORM, **group)
                return place
            except RuntimeError:
                if not self.is_lost():
                    raise

    def _has_come(self, words: int, ranks: int) -> bool:
        """Return True if all ranks of a group have come, or some will not."""
        return self._store.add(f"at {words}", 0) == ranks or self._newest_choice() > words

    def _takes_part(self) -> bool:
        self.words = max(self.words, self._newest_choice())
        return self._place.rank in self.of(self.words)

    def _newest_loss(self) -> int:
        return max((at for at, word in enumerate(self.log(), 1) if word[0] == "-"), default=0)

    def _newest_choice(self) -> int:
        return max(self._newest_loss(), *map(int, self._words(CHOSEN)), 0)

    def _wait(self, is_true: Callable[[], bool], seconds: float = PATIENCE.total_seconds()) -> bool:
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end or self._store.check([OVER]):
                return False
            time.sleep(LOOK)
        return True
