"""What activation checkpointing recomputes."""

from __future__ import annotations

import torch
from torch import nn

from rollcall.train.models.activations import recompute


class Counter:
    """A number of a user's object."""

    calls = 0


class Counting(nn.Module):
    """Scales by the calls that a list and an object count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls, self.counter = [0], Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        self.counter.calls += 1
        out: torch.Tensor = self.inner(x).tanh() * (self.calls[0] + self.counter.calls)
        return out


def trained(mode: str) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    blocks = [Counting(), Counting()]
    model = nn.Sequential(nn.Sequential(blocks[0]), blocks[1], nn.Linear(4, 1))
    recompute(model, mode)
    for _ in range(2):
        model(torch.linspace(0, 1, 8).view(2, 4)).sum().backward()
    counts = [count for block in blocks for count in (block.calls[0], block.counter.calls)]
    return [weight.grad for weight in model.parameters() if weight.grad is not None], counts


def test_numbers_in_lists_and_objects_are_those_of_the_first_pass() -> None:
    (plain, counts), (again, counts_again) = trained("none"), trained("blocks")
    assert counts == counts_again == [2] * 4
    torch.testing.assert_close(again, plain, rtol=1e-6, atol=0)
