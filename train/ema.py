"""An exponential moving average of the weights: smoother than the last step's.

Polyak and Juditsky (1992) in the form of Mean Teacher, https://arxiv.org/abs/1703.01780. It is
spread over the ranks as the weights are, and saved under their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Ema:
    """The average of what this rank holds of a model's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Begin with the present weights.

        Args:
            decay: share of the average that a step keeps.
        """
        self._model = model
        self._decay = decay
        self._averages = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take in the weights after a step, unless it was skipped."""
        for name, parameter in self._model.named_parameters():
            average, weight = _local(self._averages[name]), _local(parameter)
            share = (1 - self._decay) * (~skipped).to(average)
            average.lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average as its weights for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, to be filled in place."""
        return dict(self._averages)

    @torch.no_grad()
    def _swap(self) -> None:
        gather_anew(self._model)  # the names lead to shards again
        for name, parameter in self._model.named_parameters():
            average, weight = _local(self._averages[name]), _local(parameter)
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


def gather_anew(model: nn.Module) -> None:
    """Drop weights that FSDP2 keeps gathered since the last forward: they change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
