"""The streams of random numbers: alike where ranks must agree, apart where they must not."""

from __future__ import annotations

import torch

from train.data.order import Order
from train.randomness import derive, set_seed


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
        drawn.append((order, weights, torch.rand(3).tolist()))
    assert drawn[0] == drawn[1]
    assert drawn[0][1] != drawn[0][2]
