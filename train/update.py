"""One optimizer step: forward and backward of every micro-batch, clip, update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from train import optim
from train.config import Config
from train.data.order import Order
from train.data.source import Batch
from train.parallel import Strategy
from train.randomness import set_seed
from train.world import World


class Updated(NamedTuple):
    """What a step leaves to report, on the rank's device.

    Attributes:
        loss: the sum of this rank's weighted losses.
        grad_norm: of the whole gradient before it was clipped; None without clipping.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


class Update:
    """Changes the weights by one batch at a time."""

    def __init__(
        self,
        config: Config,
        world: World,
        order: Order,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._config = config
        self._world = world
        self._order = order
        self._strategy = strategy
        self._optimizer = optimizer

    def __call__(self, batch: Batch, step: int) -> Updated:
        """Do the update number `step` (from 0) with this rank's rows of its batch."""
        config = self._config
        set_seed(config.seed, "step", self._world.rank, step)
        rate = optim.learning_rate(config.optim, step, self._order.steps)
        optim.set_learning_rate(self._optimizer, rate)
        micro_batches = list(self._cut(batch))
        loss = self._strategy.forward_backward(micro_batches, self._order.count(step))
        max_norm = config.optim.clip_norm
        grad_norm = None if max_norm is None else self._strategy.clip(max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Updated(loss, grad_norm)

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        rows = len(batch.weights)
        size = self._config.data.micro_batch or rows
        for start in range(0, rows, size):
            part = Batch(*(tensor[start : start + size] for tensor in batch))
            yield part.to(self._world.device)
