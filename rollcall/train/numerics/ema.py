"""An exponential moving average (EMA) of the weights.

Polyak and Juditsky (1992), in the form of Mean Teacher, https://arxiv.org/abs/1703.01780. It is
spread over the ranks like the weights, and saved under their names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rollcall.train.numerics.hidden import differ
from rollcall.train.ranks.device import local_of


class Ema:
    """The average of the weights that this rank holds."""

    def __init__(self, model: nn.Module, decay: float, in_turns: bool = False) -> None:
        """Keep the share `decay` in each step; `in_turns`, a step moves only what it trains."""
        self._model, self._decay, self._in_turns = model, decay, in_turns
        weights = model.named_parameters()
        self._averages = {name: weight.detach().clone() for name, weight in weights}
        self._trained: set[str] | None = None

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Update the average after a step, unless the step was skipped."""
        weights = dict(self._model.named_parameters())
        if self._trained is None:  # in a resumed run, averages differ of what was trained before
            floats = [(n, w) for n, w in weights.items() if w.is_floating_point() or w.is_complex()]
            pairs = {n: (local_of(w), local_of(self._averages[n])) for n, w in floats}
            self._trained = {name for name, pair in pairs.items() if differ(*pair)}
        for name, parameter in weights.items():
            if parameter.requires_grad:  # others may be whole numbers
                self._trained.add(name)
            moves = parameter.grad is not None or not self._in_turns
            if name in self._trained and moves:  # also if it was frozen since
                average = local_of(self._averages[name])
                average.lerp_(local_of(parameter), (1 - self._decay) * (~skipped).to(average))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the model within this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint saves and fills; tied ones have all their names."""
        first = {parameter: name for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: self._averages[first[parameter]] for name, parameter in every}

    @torch.no_grad()
    def _swap(self) -> None:
        drop_gathered(self._model)  # so that the parameters are shards
        for name, parameter in self._model.named_parameters():
            average, weight = local_of(self._averages[name]), local_of(parameter)
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


def drop_gathered(model: nn.Module) -> None:
    """Drop the weights that FSDP2 still keeps gathered from the last forward pass: they change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
