"""Cross entropy whose scores, or copies of them in fp32, exist for some tokens at a time.

The scores of a language model in 16 bits, 8,192 tokens × 128,256 classes, take 2 GB. Converted to
fp32, their logarithms and their gradient take 4 GB each. `of_layer` computes the scores too, and
the gradient at once, as Liger Kernel does, https://arxiv.org/abs/2410.10989. Tensor ranks may each
have the scores of some classes (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3); then
they exchange a few numbers per token, never the scores. Label smoothing:
https://arxiv.org/abs/1512.00567. The loss of z, which keeps scores small: Chowdhery et al., PaLM,
https://arxiv.org/abs/2204.02311.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from rollcall.train.ranks.device import local_of

IGNORED = -100
"""A class number that marks a target which does not count, as torch's `ignore_index`."""
CHUNK = 2**25
"""Scores that are converted to fp32 at a time."""
PRODUCT = 2**27
"""Scores that `of_layer` computes at a time: with fewer, the sums of gradients take longer."""


class _Classes(NamedTuple):
    """The classes whose scores a rank has, one after the other, and how their loss is computed."""

    total: int  # of all ranks
    smoothing: float  # of labels
    z_loss: float
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

    def of_all_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return each rank's numbers: (ranks, *numbers.shape)."""
        if self.group is None:
            return numbers[None]
        every = [torch.empty_like(numbers) for _ in range(self.group.size())]
        dist.all_gather(every, numbers, group=self.group)
        return torch.stack(every)

    def losses(self, scores: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return of each token the loss, and the logarithm of the sum of exponentials."""
        both = torch.empty(2, len(scores), dtype=torch.float32, device=scores.device)
        losses, sums = both
        for part in _parts(scores, scores.shape[-1], CHUNK):
            values = scores[part].float()
            sums[part] = values.logsumexp(-1)
            # It checks the targets too, and is 0 for ignored ones.
            losses[part] = functional.nll_loss(values, local[part], reduction="none")
            losses[part] *= 1 - self.smoothing
            if self.smoothing:
                losses[part] -= self.smoothing / self.total * values.sum(-1)
        if self.group:
            losses, sums = self.of_all_ranks(both).unbind(1)
            losses, sums = losses.sum(0), sums.logsumexp(0)
        return losses + sums + self.z_loss * sums.square(), sums

    def to_gradient(
        self, scores: torch.Tensor, local: torch.Tensor, sums: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Replace scores by their gradient, given that of the losses."""
        at_target = ((local != IGNORED) * (self.smoothing - 1.0)).unsqueeze(-1)
        local = local.clamp(min=0).unsqueeze(-1)
        for part in _parts(scores, scores.shape[-1], CHUNK):
            values = (scores[part].float() - sums[part, None]).exp_()
            if self.z_loss:
                values *= 1 + 2 * self.z_loss * sums[part, None]
            if self.smoothing:
                values -= self.smoothing / self.total
            values.scatter_add_(-1, local[part], at_target[part])
            scores[part] = values.mul_(gradient[part, None])

    def hits(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return 1 for each token whose target has the largest score of all ranks' classes."""
        largest, number = scores.max(-1)
        best = torch.stack([largest.float(), (number + self.first).float()])
        every, numbers = self.of_all_ranks(best).unbind(1)
        return (numbers.gather(0, every.argmax(0, keepdim=True))[0] == targets).float()


def of_layer(
    x: torch.Tensor, layer: Any, targets: torch.Tensor, weights: torch.Tensor, *factors: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of tokens times their weights, and per token loss and hit.

    The layer maps x (tokens, hidden) to scores, which exist for some tokens at a time. The second
    result, (2, tokens), has no gradient; a hit, which is only found without gradients, is 1 where
    the target has the largest score. x and the layer may be DTensors that divide the classes.
    """
    classes = _Classes(len(layer.weight), *factors)
    if isinstance(x, DTensor):
        mesh, x = x.device_mesh, x.to_local(grad_placements=[Partial()])
        first = mesh.get_local_rank() * -(-classes.total // mesh.size())
        classes = classes._replace(first=first, group=mesh.get_group())
    kind, together = x.device.type, cast(Any, _OfLayer.apply)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        given = local_of(layer.weight), local_of(layer.bias), targets, weights
        return together(x, *given, classes, dtype, torch.is_grad_enabled())  # type: ignore[no-any-return]


class _OfLayer(torch.autograd.Function):
    """Computes the gradient in the forward pass, since the weights of the tokens are known."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, bias, targets, weights, classes, dtype, is_training = inputs
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        local = classes.local(targets, len(weight))
        weights = weights.masked_fill(targets == IGNORED, 0)
        figures = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
        small, its_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        to_x = torch.empty_like(x) if of_x and is_training else None
        to_weight = to_bias = None
        ranks = classes.group.size() if classes.group else 1
        for part in _parts(x, -(-classes.total // ranks), PRODUCT):  # the same on all ranks
            rows = x[part].to(dtype)
            scores = functional.linear(rows, small, its_bias)
            figures[0, part], sums = classes.losses(scores, local[part])
            if not is_training:
                figures[1, part] = classes.hits(scores, targets[part])
                continue
            classes.to_gradient(scores, local[part], sums, weights[part])
            if to_x is not None:
                to_x[part] = scores @ small
            if of_weight:
                more = scores.t() @ rows  # several of these add up in fp32
                to_weight = more if to_weight is None else to_weight.float().add_(more)
            if of_bias:
                more = scores.sum(0)
                to_bias = more if to_bias is None else to_bias.float().add_(more)
        figures.masked_fill_(targets == IGNORED, 0)
        pairs = (to_x, x), (to_weight, weight), (to_bias, bias)
        ctx.gradients = [None if g is None else g.to(like.dtype) for g, like in pairs]
        ctx.mark_non_differentiable(figures)
        return figures[0] @ weights, figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # they are changed in place
        return *(None if g is None else g.mul_(factor) for g in gradients), *[None] * 5


def _parts(rows: torch.Tensor, width: int, most: int) -> Iterator[slice]:
    size = max(1, most // width)
    return (slice(first, first + size) for first in range(0, len(rows), size))
