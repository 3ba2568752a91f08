"""Markers of activities nest, end with exceptions, and belong to one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from threading import get_ident

import pytest

from rollcall.train.ranks import activity
from rollcall.train.ranks.activity import doing


@doing("saving", may_take_long=True)
def save() -> tuple[str, bool]:
    with doing("waiting"):
        return activity.of(get_ident())


def test_the_innermost_counts_unless_one_may_take_long() -> None:
    assert activity.of(get_ident()) == activity.IDLE
    with doing("reading data"):
        with doing("waiting"):
            assert activity.of(get_ident()) == ("waiting", False)
        assert activity.of(get_ident()) == ("reading data", False)
        assert save() == ("saving", True)
        with doing("saving", may_take_long=True), doing("evaluating", may_take_long=True):
            assert activity.of(get_ident()) == ("evaluating", True)
        assert activity.of(get_ident()) == ("reading data", False)
    assert activity.of(get_ident()) == activity.IDLE


def test_an_activity_ends_with_an_exception() -> None:
    with pytest.raises(ValueError, match="no"), doing("reading data"):
        raise ValueError("no")
    assert activity.of(get_ident()) == activity.IDLE


def test_one_marker_serves_a_function_that_calls_itself() -> None:
    @doing("counting")
    def count(n: int) -> Iterator[str]:
        yield activity.of(get_ident())[0]
        if n:
            yield from count(n - 1)

    @doing("descending")
    def descend(n: int) -> str:
        return descend(n - 1) if n else activity.of(get_ident())[0]

    assert descend(3) == "descending"
    assert list(count(1)) == ["between steps"] * 2  # a generator's body runs after the call


def test_threads_do_not_see_each_other() -> None:
    inside, leave = threading.Event(), threading.Event()

    @doing("saving", may_take_long=True)
    def work() -> None:
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with doing("reading data"):
        assert activity.of(get_ident()) == ("reading data", False)
        assert activity.of(thread.ident or 0) == ("saving", True)
    leave.set()
    thread.join()
    assert activity.of(thread.ident or 0) == activity.IDLE
