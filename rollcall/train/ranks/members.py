"""The ranks that take part, while some are lost and come back: `faults.on_lost_rank=continue`.

The parents of the ranks write a log to the store at which the ranks meet: -3 if rank 3 is lost; a
spare process that takes its place adds +3. The first words of it, however many, say who takes part.
Ranks that lose a peer form a group by the words up to the newest loss; one that is back waits until
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

PREFIX, LOG, CHOSEN = "rollcall/members", "log", "chosen"
"""Of the keys; the log; the numbers of words by which ranks wanted to form a group."""
READY, OVER = "ready", "over"
"""Keys: set while ranks could go on without one; set if nobody takes a rank's place any more."""
SPARES, REPLACES = "ROLLCALL_SPARES", "ROLLCALL_REPLACES"
"""Variables of a rank whose node has spare processes, and of one that was one."""
PATIENCE, FORM = 60.0, timedelta(seconds=15)
"""The time that ranks wait for each other, and for a group to form of those that have come."""


class Members:
    """Who takes part, as seen by a rank, which keeps the number that it had at the start."""

    def __init__(self, place: Place) -> None:
        self._place, self.words = place, 0  # of the log, by which the present group was formed
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store: Any = dist.PrefixStore(PREFIX, dist.TCPStore(*address, is_master=False))
        if REPLACES in os.environ:
            self.store.append(LOG, f"+{place.rank} ")  # type: ignore[attr-defined]

    def read(self, key: str = LOG) -> list[str]:
        """Return the words of the log, or of another text."""
        return self.store.get(key).decode().split() if self.store.check([key]) else []

    def is_lost(self) -> bool:
        """Wait until the parents say who is lost; return False if all ranks start again."""
        return self._wait(lambda: self._newest_loss() > self.words)

    def meet(self, words: int = 0) -> Place:
        """Form the group by so many words of the log, or more; return this rank's place in it.

        Raises:
            RuntimeError: the others did not come.
        """
        self.words = words
        while self._wait(lambda: self._place.rank in self._ranks(self._newest()), math.inf):
            words = self.words = self._newest()
            ranks = self._ranks(words)
            self.store.append(CHOSEN, f"{words} ")
            self.store.add(f"at {words}", 1)
            if not self._wait(partial(self._have_come, words, len(ranks))):
                break
            if self._newest() > words:
                continue
            place = replace(self._place, rank=ranks.index(self._place.rank), world_size=len(ranks))
            group: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
            store = dist.PrefixStore(f"{words}", self.store)
            try:
                dist.init_process_group("gloo", store=store, timeout=FORM, **group)
                return place
            except RuntimeError:
                if not self.is_lost():
                    raise
        raise RuntimeError("Wait timeout: not all of the ranks that are left came")

    def _ranks(self, words: int) -> list[int]:
        ranks = set(range(self._place.world_size))
        for word in self.read()[:words]:
            ranks ^= {abs(int(word))}
        return sorted(ranks)

    def _newest(self) -> int:
        return max(self.words, self._newest_loss(), *map(int, self.read(CHOSEN)))

    def _have_come(self, words: int, ranks: int) -> bool:
        """Return True if all ranks of a group have come, or it is too late for that."""
        return self._newest() > words or self.store.add(f"at {words}", 0) == ranks

    def _newest_loss(self) -> int:
        return max((at for at, word in enumerate(self.read(), 1) if word[0] == "-"), default=0)

    def _wait(self, is_true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end or self.store.check([OVER]):
                return False
            time.sleep(0.002)
        return True
