"""BatchNorm with the statistics of the whole batch, over all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollcall.train.torch_private import BatchNorm
from rollcall.train.torch_private.overrides import BatchNormOfAll


class SyncBatchNorm(BatchNormOfAll):
    """A replacement for torch's SyncBatchNorm, which supports only GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x of shape (rows, channels, …) by the statistics of the rows of all ranks."""
        if not self.training:
            return super().forward(x)
        dtype, x = x.dtype, x.float()
        dimensions = [dimension for dimension in range(x.ndim) if dimension != 1]
        count = x.new_full((1,), x.numel() / x.shape[1])
        sums = _Sum.apply(torch.cat([x.sum(dimensions), x.square().sum(dimensions), count]))
        mean, squares = (sums[:-1] / sums[-1]).chunk(2)
        with torch.no_grad():
            self._update_running_statistics(mean, squares, sums[-1])
        shape = [1, -1, *[1] * (x.ndim - 2)]
        x = (x - mean.view(shape)) * (squares - mean.square() + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        return x.to(dtype)

    def _update_running_statistics(
        self, mean: torch.Tensor, squares: torch.Tensor, count: torch.Tensor
    ) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        variance = (squares - mean.square()) * count / (count - 1)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class _Sum(torch.autograd.Function):
    """A sum over all ranks, in the forward and the backward pass."""

    @staticmethod
    def forward(_: Any, terms: torch.Tensor) -> torch.Tensor:
        terms = terms.clone()
        dist.all_reduce(terms)
        return terms

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(None, *gradients)


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Let every BatchNorm of a model use the statistics of all ranks, under the same names."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call, no-any-return]
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.__class__ = SyncBatchNorm
    return model


def warning(model: nn.Module, ranks: int, batch: int, is_cut: bool) -> str:
    """Return a warning if the result depends on the ranks or the micro-batch; empty if not."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    plain = [norm for norm in norms if not isinstance(norm, SyncBatchNorm | nn.SyncBatchNorm)]
    if ranks > 1 and plain:
        return (
            f"each of the {ranks} ranks has its own statistics of BatchNorm, so the result depends "
            "on the number of ranks; model.sync_batchnorm=true uses those of all ranks"
        )
    if batch % ranks and norms:
        return (
            f"the {ranks} ranks repeat samples to divide data.global_batch={batch} evenly, and "
            "BatchNorm sees these too, so the result depends on the number of ranks; choose a "
            f"multiple of {ranks}"
        )
    if is_cut and norms:
        return (
            "BatchNorm computes its statistics from one micro-batch, so the result depends on "
            "data.micro_batch"
        )
    return ""
