"""Cross entropy whose copies of the scores in fp32 exist for some tokens at a time.

The scores of a language model in 16 bits, 8,192 tokens × 128,256 classes, take 2 GB. Converted to
fp32, their logarithms and their gradient take 4 GB each.

Label smoothing: Szegedy et al., https://arxiv.org/abs/1512.00567. The loss of z, which keeps scores
small: Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

IGNORED = -100
"""A class number that marks a target which does not count, as torch's `ignore_index`."""
CHUNK = 2**25
"""Scores that are converted to fp32 at a time."""


def in_chunks(
    scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    """Return the cross entropy in fp32, 0 for targets of -100: (tokens, classes) to (tokens,).

    An IndexError is raised if another target is not a class. See `losses.per_sample_loss`.
    """
    chunked: Any = _InChunks.apply
    losses: torch.Tensor = chunked(scores, targets, label_smoothing, z_loss)
    return losses


class _InChunks(torch.autograd.Function):
    """Keeps the scores and a number per token, and computes the softmax again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, targets: torch.Tensor, smoothing: float, z_loss: float
    ) -> torch.Tensor:
        losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        sums = torch.empty_like(losses)  # logarithms of the sums of exponentials
        for part in _parts(scores):
            values = scores[part].float()
            sums[part] = values.logsumexp(-1)
            # It checks the targets too, and is 0 for ignored ones.
            losses[part] = functional.nll_loss(values, targets[part], reduction="none")
            losses[part] *= 1 - smoothing
            if smoothing:
                losses[part] -= smoothing * values.mean(-1)
        losses += sums + z_loss * sums.square()
        ctx.save_for_backward(scores, targets, sums)
        ctx.factors = smoothing, z_loss
        return losses.masked_fill_(targets == IGNORED, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scores, targets, sums = ctx.saved_tensors
        smoothing, z_loss = ctx.factors
        gradient = gradient.masked_fill(targets == IGNORED, 0)
        targets = targets.clamp(min=0).unsqueeze(-1)
        at_target = sums.new_full((1, 1), smoothing - 1)
        found = torch.empty_like(scores)
        for part in _parts(scores):
            values = (scores[part].float() - sums[part, None]).exp_()
            if z_loss:
                values *= 1 + 2 * z_loss * sums[part, None]
            if smoothing:
                values -= smoothing / scores.shape[-1]
            values.scatter_add_(-1, targets[part], at_target.expand(len(values), 1))
            found[part] = values.mul_(gradient[part, None])
        return found, None, None, None


def _parts(scores: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // scores.shape[-1])
    return (slice(first, first + size) for first in range(0, len(scores), size))
