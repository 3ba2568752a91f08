"""Is a loss much larger than the last ones?"""

from __future__ import annotations

import torch
import torch.distributed as dist

MEMORY = 0.95
"""Share of the mean that a step keeps: it remembers about twenty of them."""


class Spikes:
    """Compares the loss of each step, over all ranks, with the mean of those before."""

    def __init__(self, factor: float, device: torch.device) -> None:
        """Begin without a mean; the first step makes it.

        Args:
            factor: a loss that is so many times the mean is a spike.
        """
        self._factor = factor
        self._mean = torch.full((), torch.nan, device=device)

    def found(self, loss: torch.Tensor, count: int, skipped: torch.Tensor) -> torch.Tensor:
        """Whether this step is one, on the device; every rank must call it together.

        Args:
            loss: the sum of this rank's weighted losses, of `count` samples over all ranks.
            skipped: whether the step is left out anyway, and must not count.
        """
        total = loss.clone()
        dist.all_reduce(total)
        mean = total / count
        spike = mean > self._factor * self._mean  # not true of NaN
        usual = torch.where(self._mean.isnan(), mean, self._mean.lerp(mean, 1 - MEMORY))
        self._mean.copy_(torch.where(spike | skipped, self._mean, usual))
        return spike

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, to be filled in place."""
        return {"mean": self._mean}
