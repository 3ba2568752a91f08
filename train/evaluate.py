"""How good is the model? Loss and accuracy over the validation set, every sample counted once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.data.order import validation_batches
from train.data.source import Source
from train.losses import per_sample_loss
from train.parallel import Strategy
from train.world import World

ROWS = 256
"""Samples of one forward pass on a rank, at least."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and share of correct answers over the whole validation set."""

    loss: float
    accuracy: float


def evaluate(strategy: Strategy, source: Source, world: World, global_batch: int) -> Evaluation:
    """Evaluate on all ranks together; the result is the same on each."""
    sums = torch.zeros(3, dtype=torch.float64)
    size = max(ROWS, len(strategy.rows(global_batch)))
    batches = validation_batches(source, size, strategy.data_rank, strategy.data_ranks)
    for batch in (batch.to(world.device) for batch in batches):
        outputs = strategy.forward(batch)
        losses = per_sample_loss(outputs, batch.targets) * batch.weights
        hits = (outputs.argmax(-1) == batch.targets).float()
        correct = hits.view(len(hits), -1).mean(1) * batch.weights
        sums += torch.stack([losses.sum(), correct.sum(), batch.weights.sum()]).cpu()
    dist.all_reduce(sums)
    loss, correct_count, count = sums.tolist()
    return Evaluation(loss / count, correct_count / count)
