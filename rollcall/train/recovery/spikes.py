"""Detect a loss that is much larger than the recent ones."""

import torch
import torch.distributed as dist

MEMORY = 0.95
"""Share of the running mean that each step keeps: it covers about the last twenty steps."""


class Spikes:
    """Compares the loss of each step, over all ranks, with the running mean of earlier ones."""

    def __init__(self, factor: float, device: torch.device) -> None:
        """Start without a mean; a spike will be more than `factor` times the mean."""
        self._factor = factor
        self._mean = torch.full((), torch.nan, device=device)

    def found(
        self,
        loss: torch.Tensor,  # the sum of this rank's weighted losses
        count: float | torch.Tensor,  # weight of the samples of the step over all ranks
        skipped: torch.Tensor,  # for another reason: the step must not enter the mean
    ) -> torch.Tensor:
        """Return True for a spike, as a tensor on the device; every rank calls it together."""
        total = loss.clone()
        dist.all_reduce(total)
        mean = total / count
        is_known = self._mean > 0  # false while it is NaN; no multiple of other means is a spike
        spike = is_known & (mean > self._factor * self._mean)
        usual = torch.where(is_known, self._mean.lerp(mean, 1 - MEMORY), mean)
        self._mean.copy_(torch.where(spike | skipped, self._mean, usual))
        return spike

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that a checkpoint keeps, to be filled in place."""
        return {"mean": self._mean}
