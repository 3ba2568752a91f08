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
from torch.nn.parallel import DistributedDataParallel

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
        self._arrived: set[int] = set()  # weights whose gradients the last backward has left
        self._sends = False
        self._state: Any = None

    def wrap(self, module: nn.Module) -> nn.Module:
        """DDP around the model; all ranks of the world are replicas, so the group is the default.

        Ranks that share the sequences of their samples are replicas too.
        """
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._options.bucket_mb,
            static_graph=self._options.static_graph,
        )
        if self._options.compression != "none":
            self._state, hook = _hook(self._options, self._device, self._ddp.process_group)
            self._ddp.register_comm_hook(self._state, hook)
        for weight in module.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        return self._ddp

    def _note(self, weight: torch.Tensor) -> None:
        if self._sends:
            self._arrived.add(id(weight))

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Only the last backward fills buckets and sends them."""
        self._arrived.clear()
        self._sends = last
        return nullcontext() if last else self._ddp.no_sync()

    def rejoin(self, model: nn.Module) -> bool:
        """Send what this rank has not yet sent of the step, as numbers that are none."""
        if not self._arrived:  # no gradient of the last backward: DDP does not expect any yet
            self._ddp.reducer.prepare_for_backward([])
        self._ddp.require_forward_param_sync = True
        missing = [
            weight
            for weight in model.parameters()
            if weight.requires_grad and id(weight) not in self._arrived
        ]
        if not missing:
            return False
        torch.autograd.backward(missing, [torch.full_like(one, torch.nan) for one in missing])
        return True

    def forget(self) -> None:
        """PowerSGD keeps what it has not sent yet."""
        if isinstance(self._state, powerSGD_hook.PowerSGDState):
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self._state, memory).clear()

    def describe(self, model: nn.Module) -> str:
        """The all-reduce."""
        if dist.get_world_size() == 1:
            return ""
        how = self._options.compression
        compressed = "" if how == "none" else f", compressed ({how})"
        return f"Per step one all-reduce of {size(local_bytes(model))} of gradients{compressed}."


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
