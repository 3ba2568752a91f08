"""Heartbeats of jobs of all sizes, in simulated time: the decisions are the real ones."""

import heapq
import itertools
import math
from random import Random
from typing import NamedTuple

import pytest

from rollcall.launch.node.heartbeat import (
    BEGIN,
    CHILDREN,
    EVERY,
    FAILED,
    LIMITS,
    PATIENCE,
    SELDOM,
    SUSPICION,
    Watch,
    interval,
)
from rollcall.launch.node.pulse import OVER, Opinion

BY = 10.0
"""Seconds within which the loss of a node must be noticed whose host is well."""
STOPS = 5.0
"""When a node's supervisor dies or is held up."""


class Result(NamedTuple):
    """The state at the end of a simulation."""

    lost: list[tuple[float, int]]  # when a node was taken for lost, and which one
    opened: list[float]  # when a file was opened
    told: dict[int, float]  # when each node learned that the round has failed


def simulate(
    count: int,
    delay: float,
    until: float,
    dead: int | None = None,
    failed: int | None = None,
    answer: Opinion = "refused",
) -> Result:
    """Let nodes count and look, with files that take `delay` seconds for each operation.

    Args:
        dead: a node that counts no more after STOPS.
        failed: a node that knows from its fourth count on that the round has failed.
        answer: the answer of the dead node to questions.
    """
    random = Random(count)
    every = interval(count)
    files: dict[int, list[tuple[float, bytes]]] = {}  # the newest two versions, and from when on
    watches = {number: Watch(number, count, 0.0) for number in range(count)}
    turns = [(random.uniform(0, every), number, 1) for number in range(count)]
    heapq.heapify(turns)
    result = Result([], [], {})
    while turns:
        now, number, beats = heapq.heappop(turns)
        if now > until:
            break
        began = now
        now += delay
        if number == failed and beats == 4:
            result.told[number] = began
        mark = FAILED if number in result.told else b"0"
        files[number] = [*files.get(number, [])[-1:], (now, mark + b"%07d" % beats)]
        counts = {}
        for other, is_opened in watches[number].reads(now).items():
            now += delay
            result.opened.extend([now] * is_opened)
            seen = [text for since, text in files.get(other, []) if since <= now]
            counts[other] = seen[-1] if seen else b""
        if number not in result.told and any(text.startswith(FAILED) for text in counts.values()):
            result.told[number] = now
        for other in watches[number].to_ask(now):
            is_dead = other == dead and now > STOPS
            watches[number].learn(other, answer if is_dead else "alive", now)
        silent = watches[number].look(counts, now, number in result.told)
        if silent is not None:
            result.lost.append((now, silent))
        elif number != dead or now < STOPS:
            heapq.heappush(turns, (max(now, began + every), number, beats + 1))
    return result


@pytest.mark.parametrize("delay", [0.0, 0.012])
@pytest.mark.parametrize("count", [2, 16, 1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_dead_node_is_noticed_soon_and_no_other_one(count: int, delay: float) -> None:
    healthy = simulate(count, delay, until=12)
    assert healthy.lost == []
    for dead in {0, 1, count - 1}:
        until = STOPS + interval(count) + BY
        lost = simulate(count, delay, until, dead=dead).lost
        assert {number for _, number in lost} == {dead}
        assert min(when for when, _ in lost) < until
    # Files are opened once, a few more times by a reader that is slower than the writer.
    quiet = [when for when in healthy.opened if when > 6]
    assert len(quiet) / count / 6 <= 0.3


@pytest.mark.parametrize(("count", "most"), [(2, 1.1), (17, 1.6), (100, 3.0)])
def test_a_failure_is_told_along_the_tree(count: int, most: float) -> None:
    """In larger jobs, most nodes first see the file for which they look every two seconds."""
    for failed in {0, count - 1}:
        result = simulate(count, 0.003, until=6 * interval(count) + most, failed=failed)
        assert len(result.told) == count
        assert max(result.told.values()) - result.told[failed] <= most


def test_the_work_of_a_node_does_not_grow_with_the_job() -> None:
    for count in (100, 10_000):
        watches = [len(Watch(number, count, 0.0).watched) for number in range(count)]
        assert max(watches) <= CHILDREN + 1
        assert sum(watches) == 2 * (count - 1)
    assert (interval(2), interval(10_000)) == (EVERY, SELDOM)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("answer", ["unreachable", "frozen", "alive"])
def test_a_silent_node_is_lost_only_after_a_second_opinion(count: int, answer: Opinion) -> None:
    """Its ranks may train while its supervisor waits for a disk, unless nothing is heard of it."""
    running, once_failed = LIMITS[answer]
    for limit, failed in ((running, None), (once_failed, 0)):
        after = min(limit * PATIENCE, 600.0)
        lost = simulate(count, 0.0, STOPS + after - 5, count - 1, failed, answer).lost
        assert lost == [], "too early"
        lost = simulate(count, 0.0, STOPS + after + 15, count - 1, failed, answer).lost
        assert {number for _, number in lost} == ({count - 1} if limit < math.inf else set())


@pytest.mark.parametrize("stall", [SUSPICION + 1, 10.0, PATIENCE - 1, 60.0])
def test_a_node_whose_files_stall_is_not_lost(stall: float) -> None:
    """Its count stands still, again and again, and it answers."""
    watch, now = Watch(0, 2, 0.0), 0.0
    for turn in range(20):
        end = now + (stall if turn else EVERY)
        while now < end:
            assert watch.look({1: b"%08d" % turn}, now) is None
            for number in watch.to_ask(now):
                watch.learn(number, "alive", now)
            now += EVERY


def test_a_refusal_counts_only_of_a_host_that_was_reached() -> None:
    """A firewall between the nodes refuses, too."""
    watch = Watch(0, 2, 0.0)
    for now in itertools.count(0.0, EVERY):
        for number in watch.to_ask(now):
            watch.learn(number, "refused", now)
        if watch.look({1: b"00000001"}, now) is not None:
            break
    assert PATIENCE <= now <= PATIENCE + 1


def test_nodes_that_have_not_begun_or_have_ended_are_not_asked() -> None:
    watch = Watch(0, 3, 0.0)
    watch.look({1: b"0" + OVER, 2: b""}, 1.0)
    assert not any(watch.to_ask(now) for now in (1.0, 10.0, 100.0))
    assert watch.look({}, 50.0) is None
    assert watch.look({}, BEGIN + 1) in (1, 2)
