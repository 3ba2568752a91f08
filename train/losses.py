"""How wrong are the outputs? A loss for every sample, so that padding can weigh nothing."""

from __future__ import annotations

import torch
from torch.nn import functional


def per_sample_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each sample: (rows, …, classes) and (rows, …) to (rows,)."""
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)
