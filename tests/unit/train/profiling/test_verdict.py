"""The rank that others wait for is named by its phase; noise and what all ranks share are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollcall.train.profiling.verdict import (
    SOLO_PHASES,
    LateRanks,
    Window,
    limits,
)

NAMES = [f"rank {rank} (node{rank // 2})" for rank in range(4)]
STEPS = 50
Told = list[dict[str, Any]]


def windows(late: LateRanks, extra: np.ndarray, steps: list[int], noise: float = 0.0) -> Told:
    """Feed windows of 5 steps in which ranks spend `extra` seconds; others wait for the slowest."""
    random, found, limit = np.random.default_rng(0), [], np.full((4, 6), np.inf)
    for step in steps:
        each = []
        for _ in range(5):
            own = 0.002 + extra + noise * random.exponential(size=(4, 6))
            own[:, 3] = 0
            own[:, 3] = own.sum(1).max() - own.sum(1)
            each.append(own)
        seen = np.sum([one > limit for one in each], 0)
        window = Window(step, 5, np.mean(each, 0), seen)
        limit = limits(window.phases)
        found += [told for told in [late.add(window)] if told]
    return found


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", SOLO_PHASES)
def test_one_rank_is_late(rank: int, phase: int) -> None:
    extra = np.zeros((4, 6))
    extra[rank, phase] = 0.048
    [found] = windows(LateRanks(NAMES), extra, [*range(5, STEPS, 5)], noise=0.0005)
    assert (found["rank"], found["late"], found["steps"]) == (rank, 15, 20)
    assert f"{NAMES[rank]} is 48 ms late in " in found["text"], found
    assert found["text"].endswith("is normal") and found["times"] > 3


def test_noise_and_a_slow_reader_of_all_name_nobody() -> None:
    assert not windows(LateRanks(NAMES), np.zeros((4, 6)), [*range(500)], noise=0.003)
    extra = np.zeros((4, 6))
    extra[:, 0] = 0.05
    assert not windows(LateRanks(NAMES), extra, [*range(50)])


def test_two_late_ranks_are_named_once_each() -> None:
    extra = np.zeros((4, 6))
    extra[1, 0], extra[2, 4] = 0.05, 0.04
    found = windows(LateRanks(NAMES), extra, [*range(20)])
    assert [(one["rank"], one["phase"]) for one in found] == [(1, "data"), (2, "optimizer")]
