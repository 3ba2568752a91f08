"""Every rank holds a replica and computes a share of the batch; gradients are averaged.

DistributedDataParallel, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from train.parallel.part import Part, local_bytes, size
from train.schema import Parallel


class Replicate(Part):
    """Replicas kept equal by averaging their gradients in every step."""

    # DDP lays out its buckets anew after its first backward, in the order of the gradients. The
    # layout decides in which order a ring adds the ranks' numbers: without this the first step
    # after a resume would differ in the last bit from an uninterrupted run's.
    warm_ups = 2

    def __init__(self, options: Parallel, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._ddp: DistributedDataParallel

    def apply(self, model: nn.Module) -> nn.Module:
        """Wrap the model; all ranks of the world are replicas, so their group is the default."""
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._options.bucket_mb,
            static_graph=self._options.static_graph,
        )
        if self._options.compression != "none":
            self._ddp.register_comm_hook(
                *_hook(self._options, self._device, self._ddp.process_group)
            )
        return self._ddp

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Only the last backward fills buckets and sends them."""
        return nullcontext() if last else self._ddp.no_sync()

    def describe(self, model: nn.Module) -> str:
        """The all-reduce."""
        if dist.get_world_size() == 1:
            return ""
        how = self._options.compression
        compressed = "" if how == "none" else f", compressed ({how})"
        return f"Per step one all-reduce of {size(local_bytes(model))} of gradients{compressed}."


class Threads(Part):
    """nn.DataParallel: one process, a thread and a replica for each of its GPUs."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Wrap the model."""
        return DataParallel(model)

    def describe(self, model: nn.Module) -> str:
        """What the GPUs exchange, if there are any."""
        count = torch.cuda.device_count()
        if count < 2:
            return f"nn.DataParallel found {count} GPUs, so it passes through to the plain model."
        return (
            f"nn.DataParallel copies {size(local_bytes(model))} of weights to {count} GPUs "
            "for each micro-batch, and adds as many gradients on the first."
        )


def _hook(options: Parallel, device: torch.device, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """State and function that send a bucket in fewer bits."""
    if options.compression == "fp16":
        return group, default_hooks.fp16_compress_hook
    if options.compression == "bf16":
        return group, default_hooks.bf16_compress_hook
    # PowerSGD, https://arxiv.org/abs/1905.13727. It begins after the warm-up: torch wants the
    # buckets in their final layout.
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=Replicate.warm_ups
    )
    return state, powerSGD_hook.powerSGD_hook if device.type == "cuda" else _power_sgd_in_order


@wraps(powerSGD_hook.powerSGD_hook)  # DDP reads the annotations, and wants no strings
def _power_sgd_in_order(
    state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    # The hook sends its second and third message from callbacks. Gloo runs those of two buckets in
    # another order on each rank and pairs messages of different sizes, which aborts (torch 2.15):
    # so a bucket is done before the next begins.
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future
