"""The average of the weights goes on after a resume as without one."""

from __future__ import annotations

import torch
from torch import nn

from rollcall.train.numerics.ema import Ema

KEPT = torch.tensor(False)


def test_weights_that_were_frozen_at_the_start_and_since_go_on_after_a_resume() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    counts = nn.Parameter(torch.tensor([3]), requires_grad=False)  # a whole number has no average
    model.register_parameter("counts", counts)
    average = Ema(model, 0.9)
    model.bias.requires_grad_(True)  # as forward() may do for some steps
    with torch.no_grad():
        model.bias.add_(1)
    average.update(KEPT)
    model.bias.requires_grad_(False)

    resumed = Ema(model, 0.9)
    for name, tensor in resumed.state().items():
        tensor.copy_(average.state()[name])
    for _ in range(3):
        average.update(KEPT)
        resumed.update(KEPT)
    torch.testing.assert_close(resumed.state(), average.state(), rtol=0, atol=0)
    assert not torch.equal(average.state()["bias"], model.bias)
