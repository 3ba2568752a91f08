"""The streams of random numbers: alike where ranks must agree, apart where they must not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rollcall.train.data.order import Order
from rollcall.train.numerics.randomness import Fork, derive, set_seed


def test_streams_are_apart_and_depend_on_nothing_that_was_drawn_before() -> None:
    purposes = [("model",), *(("step", rank, step) for rank in range(4) for step in range(50))]
    purposes += [("order", epoch, number) for epoch in range(5) for number in range(8)]
    seeds = {derive(seed, *purpose) for seed in (0, 1) for purpose in purposes}
    assert len(seeds) == 2 * len(purposes)

    drawn = []
    for before in (1, 2):  # ranks come with generators in any state
        torch.manual_seed(before)
        order = Order(100, 100, 10, seed=0).samples(0, range(10))
        set_seed(0, "model")
        weights = torch.rand(3).tolist()
        set_seed(0, "step", 0, 5)
        others = random.random(), np.random.random()
        drawn.append((order, weights, torch.rand(3).tolist(), others))
    assert drawn[0] == drawn[1]
    assert drawn[0][1] != drawn[0][2]


def test_a_piece_draws_its_own_numbers_and_the_common_stream_goes_on() -> None:
    def passes(piece: int) -> tuple[list[float], list[float]]:
        fork, common, own = Fork("cpu", "tensor", piece), [], []
        for _ in range(3):
            common.append(torch.rand(()).item())
            with fork.inside():
                own += torch.rand(2).tolist()
        return common, own

    set_seed(0, "step", 0, 5)
    state = torch.get_rng_state()
    common, own = passes(0)
    other_common, other = passes_from(state, passes, 1)
    assert common == other_common
    assert len({*common, *own, *other}) == 3 + 6 + 6
    assert passes_from(state, passes, 0) == (common, own)  # as activation checkpointing repeats it


def passes_from(state: torch.Tensor, passes: Any, piece: int) -> Any:
    torch.set_rng_state(state)
    return passes(piece)


def test_a_failed_pass_does_not_leave_a_piece_in_its_stream() -> None:
    fork = Fork("cpu", "tensor", 1)
    fork.enter()  # and an exception before `leave`
    set_seed(0, "step", 0, 6)
    expected = torch.rand(2).tolist()
    set_seed(0, "step", 0, 6)
    fork.leave()
    assert torch.rand(2).tolist() == expected
