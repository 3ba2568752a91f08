"""How good is the model? Figures over the validation set, every sample counted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from train.config import Config
from train.data.loading import Loading
from train.data.order import validation_batches
from train.data.source import Source
from train.losses import PerSample, per_sample_loss
from train.parallel import Strategy
from train.world import World

ROWS = 256
"""Samples of one forward pass on a rank, at least."""
MANY_CLASSES = 20
"""With so many it also tells whether the answer is among the five that the model prefers."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the whole validation set; None for what does not suit the data.

    Attributes:
        loss: mean loss.
        accuracy: share of correct answers.
        top5: share of answers among the five best, where there are many classes.
        perplexity: exp(loss), for sequences of classes.
    """

    loss: float
    accuracy: float | None = None
    top5: float | None = None
    perplexity: float | None = None

    def figures(self) -> dict[str, float]:
        """Those that suit the data, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        shares = {"accuracy": self.accuracy, "top 5": self.top5}
        words = [f"loss {self.loss:.4f}"]
        words += [f"{name} {share:.2%}" for name, share in shares.items() if share is not None]
        words += [] if self.perplexity is None else [f"perplexity {self.perplexity:.2f}"]
        return "  ".join(words)


def evaluate(
    strategy: Strategy,
    source: Source,
    world: World,
    config: Config,
    loss: PerSample = per_sample_loss,
    is_asked_to_stop: Callable[[], bool] = bool,
) -> Evaluation | None:
    """Evaluate on all ranks together; the result is the same on each.

    Returns:
        None if some rank was asked to stop meanwhile: there may be no time for all of it.

    Raises:
        ConfigError: more samples than `data.skip_unreadable` could not be read.
    """
    own, shares = strategy.shares
    size = max(ROWS, len(strategy.rows(config.data.global_batch)) // len(own))
    loading = Loading(config.data, config.seed, world.rank, world.device)
    is_classified = is_sequence = has_many = False
    terms = []
    for share in own:
        sums = torch.zeros(5, dtype=torch.float64)
        before = loading.unreadable
        batches = validation_batches(source, size, share, shares, loading)
        for batch in (batch.to(world.device) for batch in batches):
            if world.has_any(is_asked_to_stop()):
                return None
            outputs, targets = strategy.forward(batch), batch.targets
            is_classified = not targets.is_floating_point() and outputs.shape[:-1] == targets.shape
            is_sequence = is_classified and targets.ndim > 1
            has_many = is_classified and outputs.shape[-1] >= MANY_CLASSES and not is_sequence
            hits = _hits(outputs, targets, 1) if is_classified else torch.zeros_like(batch.weights)
            hits5 = _hits(outputs, targets, 5) if has_many else hits
            values = (loss(outputs, targets), hits, hits5, torch.ones_like(batch.weights))
            for place, value in enumerate(values):
                sums[place] += (value * batch.weights).sum().cpu()
        sums[-1] = (loading.unreadable - before) * strategy.data_ranks / world.world_size
        terms.append(sums)
    total, hit, hit5, count, unreadable = strategy.add(terms).tolist()
    loading.refuse(world, unreadable)
    return Evaluation(
        total / count,
        hit / count if is_classified else None,
        hit5 / count if has_many else None,
        math.exp(min(total / count, 700)) if is_sequence else None,
    )


def _hits(outputs: torch.Tensor, targets: torch.Tensor, best: int) -> torch.Tensor:
    """Share of each sample's targets among the best answers: (rows,)."""
    found = (outputs.topk(best).indices == targets.unsqueeze(-1)).any(-1)
    return found.float().view(len(found), -1).mean(1)
