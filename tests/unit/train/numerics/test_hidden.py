"""The hidden state of objects is put back in place."""

import torch
from torch import nn

from rollcall.train.numerics.hidden import Hidden, left_alone


class Remembering(nn.Module):
    """Keeps numbers, weights and layers in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4)
        self.numbers, self.mixed = [1.0, 2.0], [1.0, nn.Parameter(torch.ones(2)), 2.0]


def test_lists_are_as_before_and_keep_their_weights() -> None:
    model = Remembering()
    weights, mixed = [*model.recurrent._flat_weights], [*model.mixed]
    with left_alone({"model": model}):
        model.numbers.append(3.0)
        model.mixed[2] = 5.0
    assert model.numbers == [1.0, 2.0]
    assert all(now is before for now, before in zip(model.mixed, mixed, strict=True))
    now = model.recurrent._flat_weights
    assert all(one is before for one, before in zip(now, weights, strict=True))
    with left_alone({"model": model}):
        model.numbers.clear()
    assert model.numbers == [1.0, 2.0]


def test_buffers_that_checkpoints_hold_are_copied_only_where_they_are_needed() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("temporary", torch.zeros(5), persistent=False)

    def copied(also_saved: bool) -> int:
        kept = [kept for _, kept in Hidden({"model": model}, also_saved)._kept]
        return sum(copy.numel() for one in kept for _, copy in one.values() if copy is not None)

    assert (copied(also_saved=False), copied(also_saved=True)) == (5, 5 + 3 + 3 + 1)
