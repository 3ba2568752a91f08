"""Data parallelism by replicas: DistributedDataParallel, https://arxiv.org/abs/2006.15704."""

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from rollcall.config.schema import Parallel
from rollcall.messages.refusal import RankError
from rollcall.train import torch_private
from rollcall.train.parallel.part import Part, named_buffers
from rollcall.train.ranks.world import copy_sparse_gradients


class Replicate(Part):
    """Replicas that stay equal by averaging their gradients in every step."""

    # DDP rebuilds its buckets after the first backward pass, and the buckets determine the order of
    # sums. Without a warm-up, the first step after a resume would differ in the last bit from the
    # same step of an uninterrupted run.
    warm_ups = 2
    changes_passes = False

    def __init__(self, options: Parallel, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._ddp: DistributedDataParallel
        # Of several backward passes, the weights with a gradient of the last one. If there is only
        # one, the gradients themselves show it, and hooks would cost time.
        self._arrived: set[int] | None = None
        self._sends = False
        self._weights: list[nn.Parameter]
        # Only if a step has left weights out: the search walks the graph of every step.
        self._searches = False
        self._state: Any = None

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap the model in DDP, with the default group: all ranks of the world are replicas."""
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        copy_sparse_gradients(module)
        return self._wrapped(module)

    def allow_unused(self, module: nn.Module) -> nn.Module:  # noqa: ARG002
        """Wrap the model again, in a DDP that searches every step for unused weights."""
        self._searches = True
        return self._wrapped(self._ddp.module)

    def _wrapped(self, module: nn.Module) -> nn.Module:
        # DDP broadcasts all buffers in every step. Those that no checkpoint holds are constants.
        torch_private.ignore_in_ddp(module, _constants(module))
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._options.bucket_mb,
            gradient_as_bucket_view=True,  # one copy of all gradients less
            find_unused_parameters=self._searches,
        )
        if self._options.compression != "none":
            self._state, hook = _hook(self._options, self._device, self._ddp.process_group)
            self._ddp.register_comm_hook(self._state, hook)
        return self._ddp

    def _note(self, weight: torch.Tensor) -> None:
        if self._sends and self._arrived is not None:
            self._arrived.add(id(weight))

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Let only the last backward pass fill and send buckets."""
        if not last and self._arrived is None:
            self._arrived = set()
            for weight in self._weights:
                weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.clear()
        self._sends = last
        return nullcontext() if last else self._ddp.no_sync()

    def finish(self, model: nn.Module) -> bool:
        """Return True if DDP still waited for gradients, after it has been sent NaN."""
        is_unused = not self._searches and bool(self._missing())
        if is_unused:
            self.finish_with_nan(model)
        return is_unused

    def _missing(self) -> list[nn.Parameter]:
        if self._arrived is None:
            return [weight for weight in self._weights if weight.grad is None]
        return [weight for weight in self._weights if id(weight) not in self._arrived]

    def finish_with_nan(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Send NaN for the gradients that this rank has not contributed yet."""
        missing = self._missing()
        has_begun = len(missing) < len(self._weights)
        if self._searches and has_begun:
            return False  # nobody knows for which gradients DDP still waits
        if not has_begun:  # the last backward pass has not begun, so DDP does not expect any
            # Its search takes all weights for used on which these sums depend.
            used = [weight.sum() for weight in missing] if self._searches else []
            torch_private.expect_gradients(self._ddp, used)
        self._ddp.require_forward_param_sync = True
        if not missing:
            return False
        if not all(weight.requires_grad for weight in missing):
            raise RankError(
                "forward() sets requires_grad of weights to False, which ranks with ddp and zero1 "
                "have to know before: name them in model.freeze, or choose parallel.strategy=zero3"
            )
        torch.autograd.backward(missing, [torch.full_like(one, torch.nan) for one in missing])
        return True

    def forget(self) -> None:
        """Clear the error memory of PowerSGD."""
        if isinstance(self._state, powerSGD_hook.PowerSGDState):
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self._state, memory).clear()


def _constants(module: nn.Module) -> set[str]:
    buffers = named_buffers(module)
    return {n for n, owner, leaf in buffers if leaf in torch_private.temporary_buffers(owner)}


def _hook(options: Parallel, device: torch.device, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Return the state and function of a communication hook that compresses a bucket."""
    if options.compression == "fp16":
        return group, default_hooks.fp16_compress_hook
    if options.compression == "bf16":
        return group, default_hooks.bf16_compress_hook
    # PowerSGD, https://arxiv.org/abs/1905.13727. It starts after the warm-up, when the buckets have
    # their final layout, as torch requires.
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=Replicate.warm_ups
    )
    return state, powerSGD_hook.powerSGD_hook if device.type == "cuda" else _power_sgd_in_order


@wraps(powerSGD_hook.powerSGD_hook)  # DDP reads the annotations, which must not be strings
def _power_sgd_in_order(
    state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    # The hook sends its second and third message from callbacks. Gloo may run the callbacks of two
    # buckets in a different order on each rank, which pairs messages of different sizes and aborts
    # (torch 2.15). So each bucket finishes before the next starts.
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future
