"""BatchNorm on several ranks: statistics of the whole batch, or of what one rank sees?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """What torch's does, which works on GPUs alone, in plain operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (rows, channels, …) by the statistics of the rows of all ranks."""
        if not self.training:
            normalised: torch.Tensor = super().forward(x)
            return normalised
        dtype, x = x.dtype, x.float()
        over = [dimension for dimension in range(x.ndim) if dimension != 1]
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype)
        sums = torch.cat([x.sum(over), x.square().sum(over), count])
        sums = _Sum.apply(sums)
        mean, squares = (sums[:-1] / sums[-1]).chunk(2)
        with torch.no_grad():
            self._remember(mean, squares, sums[-1])
        shape = [1, -1, *[1] * (x.ndim - 2)]
        x = (x - mean.view(shape)) * (squares - mean.square() + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        return x.to(dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any image, sequence or volume."""

    def _remember(self, mean: torch.Tensor, squares: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1 / float(self.num_batches_tracked)
        variance = (squares - mean.square()) * count / (count - 1)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class _Sum(torch.autograd.Function):
    """Over all ranks, forward and backward."""

    @staticmethod
    def forward(_: Any, terms: torch.Tensor) -> torch.Tensor:
        terms = terms.clone()
        dist.all_reduce(terms)
        return terms

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Let every BatchNorm of a model use the samples of all ranks; names and weights stay."""
    if device.type == "cuda":
        synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return synchronized
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm
    return model


def warning(model: nn.Module, ranks: int, is_cut: bool) -> str:
    """Why the result of a model with BatchNorm will depend on the number of ranks, or nothing.

    Args:
        ranks: that compute different samples of a batch.
        is_cut: whether a rank computes its share in several micro-batches.
    """
    plain = any(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
        for module in model.modules()
    )
    if ranks > 1 and plain:
        return (
            f"the model has BatchNorm, which takes its statistics from the samples of one of the "
            f"{ranks} ranks, so the result depends on their number: model.sync_batchnorm=true "
            "takes them from all"
        )
    if is_cut and any(isinstance(module, _BatchNorm) for module in model.modules()):
        return (
            "the model has BatchNorm, which takes its statistics from one micro-batch, so the "
            "result depends on data.micro_batch"
        )
    return ""
