"""Cross entropy whose copies of the scores in fp32 exist for some tokens at a time.

The scores of a language model in 16 bits, 8,192 tokens × 128,256 classes, take 2 GB. Converted to
fp32, their logarithms and their gradient take 4 GB each. Tensor ranks may each have the scores of
some classes (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3); then they exchange two
numbers per token, never the scores. Label smoothing: https://arxiv.org/abs/1512.00567. The loss of
z, which keeps scores small: Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

IGNORED = -100
"""A class number that marks a target which does not count, as torch's `ignore_index`."""
CHUNK = 2**25
"""Scores that are converted to fp32 at a time."""


class _Classes(NamedTuple):
    """The classes whose scores a rank has, one after the other."""

    total: int  # of all ranks
    first: int = 0
    group: dist.ProcessGroup | None = None  # the ranks that have the others

    def local(self, targets: torch.Tensor, count: int) -> torch.Tensor:
        """Return targets as numbers of this rank's `count` classes, and -100 for the others'."""
        if self.group is None:
            return targets
        number = targets - self.first
        is_class = (targets >= 0) & (targets < self.total)
        number = number.masked_fill(~is_class, count)  # which is an error on every rank
        is_others = is_class & ((number < 0) | (number >= count))
        return number.masked_fill(is_others | (targets == IGNORED), IGNORED)


def in_chunks(
    scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    """Return the cross entropy in fp32, 0 for targets of -100: (tokens, classes) to (tokens,).

    The scores may be a DTensor whose classes are divided over the ranks of its mesh. An IndexError
    is raised if another target is not a class. See `losses.per_sample_loss`.
    """
    chunked: Any = _InChunks.apply
    classes = _Classes(scores.shape[-1])
    if isinstance(scores, DTensor):
        mesh = scores.device_mesh
        first = mesh.get_local_rank() * -(-classes.total // mesh.size())
        scores, classes = scores.to_local(), _Classes(classes.total, first, mesh.get_group())
    losses: torch.Tensor = chunked(scores, targets, (label_smoothing, z_loss), classes)
    return losses


class _InChunks(torch.autograd.Function):
    """Keeps the scores and a number per token, and computes the softmax again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, targets: torch.Tensor, factors: Any, classes: _Classes
    ) -> torch.Tensor:
        smoothing, z_loss = factors
        # Of each token the loss, and the logarithm of the sum of exponentials.
        both = torch.empty(2, len(scores), dtype=torch.float32, device=scores.device)
        losses, sums = both
        local = classes.local(targets, scores.shape[-1])
        for part in _parts(scores):
            values = scores[part].float()
            sums[part] = values.logsumexp(-1)
            # It checks the targets too, and is 0 for ignored ones.
            losses[part] = functional.nll_loss(values, local[part], reduction="none")
            losses[part] *= 1 - smoothing
            if smoothing:
                losses[part] -= smoothing / classes.total * values.sum(-1)
        if classes.group:
            every = [torch.empty_like(both) for _ in range(classes.group.size())]
            dist.all_gather(every, both, group=classes.group)
            losses, sums = torch.stack(every).unbind(1)
            losses, sums = losses.sum(0), sums.logsumexp(0)
        losses += sums + z_loss * sums.square()
        ctx.save_for_backward(scores, targets, local, sums)
        ctx.factors = *factors, classes.total
        return losses.masked_fill_(targets == IGNORED, 0)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scores, targets, local, sums = ctx.saved_tensors
        smoothing, z_loss, count = ctx.factors
        gradient = gradient.masked_fill(targets == IGNORED, 0)
        at_target = ((local != IGNORED) * (smoothing - 1.0)).unsqueeze(-1)
        local = local.clamp(min=0).unsqueeze(-1)
        found = torch.empty_like(scores)
        for part in _parts(scores):
            values = (scores[part].float() - sums[part, None]).exp_()
            if z_loss:
                values *= 1 + 2 * z_loss * sums[part, None]
            if smoothing:
                values -= smoothing / count
            values.scatter_add_(-1, local[part], at_target[part])
            found[part] = values.mul_(gradient[part, None])
        return found, None, None, None


def _parts(scores: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // scores.shape[-1])
    return (slice(first, first + size) for first in range(0, len(scores), size))
