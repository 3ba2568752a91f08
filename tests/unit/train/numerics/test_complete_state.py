"""To fill the state of a fresh optimizer changes no weight, and leaves no state out."""

from typing import Any

import pytest
import torch
from torch import nn

from rollcall.train.numerics.optim import complete_state


class OwnDecay(torch.optim.Optimizer):
    """Decays weights under a key of its own, also if the gradient is zero."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "wd": 0.5})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Decay, and count the step."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.mul_(1 - group["wd"])
                self.state[weight]["count"] = torch.zeros(())


@pytest.mark.parametrize("optimizer", [OwnDecay, torch.optim.RMSprop, torch.optim.Adam])
def test_the_weights_stay_and_all_state_is_there(optimizer: Any) -> None:
    model = nn.Linear(2, 2)
    made = optimizer(model.parameters())
    before = [weight.clone() for weight in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    complete_state(made)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(made.state[weight] for weight in model.parameters())
    assert all(weight.grad is not None for weight in model.parameters())
    assert made.param_groups[0]["lr"] == optimizer(model.parameters()).param_groups[0]["lr"]
