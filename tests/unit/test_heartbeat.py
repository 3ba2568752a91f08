"""Heartbeats of jobs of all sizes, in simulated time: the decisions are the real ones."""

import heapq
from random import Random
from typing import NamedTuple

import pytest

from rollcall.launch.node.heartbeat import CHILDREN, EVERY, FAILED, SELDOM, Watch, interval

BY = 10.0
"""Seconds within which the loss of a node must be noticed."""


class Result(NamedTuple):
    """The state at the end of a simulation."""

    lost: list[tuple[float, int]]  # when a node was taken for lost, and which one
    opened: list[float]  # when a file was opened
    told: dict[int, float]  # when each node learned that the round has failed


def simulate(
    count: int, delay: float, until: float, dead: int | None = None, failed: int | None = None
) -> Result:
    """Let nodes count and look, with files that take `delay` seconds for each operation.

    Args:
        dead: a node that counts once.
        failed: a node that knows from its fourth count on that the round has failed.
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
        silent = watches[number].look(counts, now)
        if silent is not None:
            result.lost.append((now, silent))
        elif number != dead:
            heapq.heappush(turns, (max(now, began + every), number, beats + 1))
    return result


@pytest.mark.parametrize("delay", [0.0, 0.012])
@pytest.mark.parametrize("count", [2, 16, 2500, 10_000])
def test_a_dead_node_is_noticed_soon_and_no_other_one(count: int, delay: float) -> None:
    healthy = simulate(count, delay, until=12)
    assert healthy.lost == []
    for dead in {0, 1, count - 1}:
        lost = simulate(count, delay, until=interval(count) + BY, dead=dead).lost
        assert {number for _, number in lost} == {dead}
        assert min(when for when, _ in lost) < interval(count) + BY
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
