"""An exponential moving average (EMA) of the weights.

Polyak and Juditsky (1992), in the form of Mean Teacher, https://arxiv.org/abs/1703.01780. It is
spread over the ranks like the weights, and saved under their names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Ema:
    """The average of the weights that this rank holds."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start with the current weights; a step keeps the fraction `decay` of the average."""
        self._model = model
        self._decay = decay
        self._averages = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Update the average after a step, unless the step was skipped."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:  # others may be whole numbers
                average = _local(self._averages[name])
                average.lerp_(_local(parameter), (1 - self._decay) * (~skipped).to(average))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the model within this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint saves, and fills in place on a resume.

        Those of a tied weight come under all its names, as in the state of the model.
        """
        first = {parameter: name for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: self._averages[first[parameter]] for name, parameter in every}

    @torch.no_grad()
    def _swap(self) -> None:
        drop_gathered(self._model)  # so that the parameters are shards
        for name, parameter in self._model.named_parameters():
            average, weight = _local(self._averages[name]), _local(parameter)
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


def drop_gathered(model: nn.Module) -> None:
    """Drop the weights that FSDP2 still keeps gathered from the last forward pass: they change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
