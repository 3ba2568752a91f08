"""Ranks are lost and come back; threads with one store are the ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rollcall.train.ranks import members
from rollcall.train.ranks.members import OVER, PREFIX, REPLACES, Members

SIZE = 4


class Ranks:
    """The ranks of an attempt, and their parents' part: the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(self.server.port))
        monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
        self._monkeypatch, self.store = monkeypatch, dist.PrefixStore(PREFIX, self.server)
        self.members = [Members(rank, SIZE) for rank in range(SIZE)]

    def lose(self, rank: int) -> bool:
        """Write a loss into the log; return whether others are left."""
        return members.lose(self.store, rank, SIZE)

    def replace(self, rank: int) -> Members:
        """Start another process in the place of a rank."""
        with self._monkeypatch.context() as patch:
            patch.setenv(REPLACES, "1")
            self.members[rank] = Members(rank, SIZE)
        return self.members[rank]

    def start(self, *ranks: int) -> Callable[[], list[Any]]:
        """Let ranks meet; return what waits for them and returns their places, or their errors."""
        found: dict[int, Any] = {}

        def meet(rank: int) -> None:
            time.sleep(random.uniform(0, 0.02))
            try:
                found[rank] = self.members[rank].meet()
            except RuntimeError as error:
                found[rank] = error

        threads = [threading.Thread(target=meet, args=[rank], daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()

        def wait() -> list[Any]:
            for thread in threads:
                thread.join(60)
            return [found.get(rank) for rank in ranks]

        return wait


def places(*ranks: int, size: int) -> list[dict[str, int]]:
    return [{"rank": rank, "world_size": size} for rank in ranks]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_the_others_form_a_group_and_a_rank_that_is_back_takes_part_again(ranks: Ranks) -> None:
    ranks.lose(1)
    assert all(ranks.members[rank].is_lost() for rank in (0, 2, 3))
    ranks.replace(1)
    waits = ranks.start(1)
    assert ranks.start(0, 2, 3)() == places(0, 1, 2, size=3), "not with the rank that is back"
    assert ranks.members[0].back() == ["1"]
    everyone = ranks.start(0, 2, 3)
    ranks.members[0].let_in()
    assert ranks.members[0].back() == []
    assert everyone() + waits() == places(0, 2, 3, 1, size=4)


def test_a_loss_while_a_group_forms_ends_in_a_smaller_one(ranks: Ranks) -> None:
    ranks.lose(0)
    first = ranks.start(1, 2)
    time.sleep(0.1)  # they wait for rank 3
    ranks.lose(3)
    assert first() == places(0, 1, size=2)


def test_a_rank_that_is_lost_again_before_it_is_back_takes_part_later(ranks: Ranks) -> None:
    ranks.lose(2)
    ranks.replace(2)
    assert ranks.start(0, 1, 3)() == places(0, 1, 2, size=3)
    ranks.members[0].let_in()
    ranks.lose(2)
    assert ranks.start(0, 1, 3)() == places(0, 1, 2, size=3)
    ranks.replace(2)
    assert ranks.members[0].back() == ["2"]


def test_a_process_that_dies_while_it_waits_to_come_back_takes_no_part(ranks: Ranks) -> None:
    ranks.lose(2)
    ranks.replace(2)
    ranks.lose(2)
    assert ranks.start(0, 1, 3)() == places(0, 1, 2, size=3)
    ranks.replace(2)
    ranks.members[0].let_in()
    assert ranks.start(0, 1, 2, 3)() == places(0, 1, 2, 3, size=4)


def test_nobody_waits_once_all_restart(ranks: Ranks) -> None:
    ranks.lose(1)
    waits = ranks.start(0, 2)
    time.sleep(0.1)
    ranks.store.set(OVER, "")
    assert all(isinstance(place, RuntimeError) for place in waits())


def test_nobody_is_left_once_all_are_lost(ranks: Ranks) -> None:
    assert [ranks.lose(rank) for rank in (2, 0, 2, 3)] == [True] * 4
    ranks.replace(2)
    assert not ranks.lose(1), "the process that waits to come back would wait for ever"
