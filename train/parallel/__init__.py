"""How the model is spread over the ranks: one file per family, one protocol.

A new strategy is a new file, a line in STRATEGIES and a choice in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from train.config import Config
from train.data.source import Batch
from train.parallel.ddp import Ddp
from train.parallel.single import Single
from train.world import World

PerSampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Strategy(Protocol):
    """What the loop asks of a way to spread a model; it never asks which one it is."""

    def rows(self, batch: int) -> range:
        """This rank's rows in a global batch of this size, as many on every rank."""

    def place(self, model: nn.Module, example: Batch) -> None:
        """Take the model to this rank's device, and what it takes to keep the ranks alike.

        Args:
            model: the same on every rank.
            example: a batch of the size that every step will have.
        """

    def parameters(self) -> Iterable[nn.Parameter]:
        """What this rank's optimizer updates."""

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Leave on every rank the gradient of the mean loss over all `count` samples of the step.

        Returns:
            The sum of this rank's weighted losses, as a scalar on its device.
        """

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model's outputs for this rank's rows, without gradients."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient to at most this norm over the whole model; return its norm before."""

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer under global names, for saving or for loading into."""

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back what `state` returned and a checkpoint has filled."""


STRATEGIES: dict[str, type[Single]] = {"ddp": Ddp, "single": Single}


def build(config: Config, world: World, loss: PerSampleLoss) -> Strategy:
    """The strategy that the configuration names.

    Raises:
        ConfigError: it cannot work at this world size.
    """
    return STRATEGIES[config.parallel.strategy](config.precision, world, loss)
