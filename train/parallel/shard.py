"""ZeRO: each rank holds a shard of the optimizer state, the gradients and the weights.

ZeRO, https://arxiv.org/abs/1910.02054; FSDP2, https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from rollcall.config import ConfigError
from rollcall.text import size
from rollcall.train.data.source import Batch
from rollcall.train.parallel.part import MakeOptimizer, Part, local_bytes


class Shard(Part):
    """Stages 2 and 3: weights are sharded, and gathered unit by unit when they are used.

    Stage 2 keeps them gathered from the first forward to the last backward pass of a step.
    """

    shards = True
    suspicion = "weights that are used outside the forward method of their module"

    def __init__(self, mesh: DeviceMesh, stage: int, offload: bool, gathers_bf16: bool) -> None:
        """Shard over the last dimension of the mesh; a first dimension replicates the shards.

        With `gathers_bf16`, weights are gathered in bf16; gradients are still reduced in fp32.
        """
        self._mesh = mesh
        self._stage = stage
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        self._policy = pinned if offload else OffloadPolicy()
        self.rounds = gathers_bf16
        self._dtype = torch.bfloat16 if gathers_bf16 else None
        self._reduced = torch.float32 if gathers_bf16 else None
        # The modules that are called; fully_shard has made them FSDPModules in place.
        self._roots: list[Any] = []
        self._is_last = True

    def apply(self, model: nn.Module) -> None:
        """Shard every unit that shares no weights with others; `wrap` shards the rest as one."""
        for unit in [unit for unit in units(model) if not _shares_weights(unit, model)]:
            self._shard(unit)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard the remaining weights."""
        self._shard(module)
        self._roots.append(module)
        return module

    def _shard(self, module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=self._stage == 3,
            offload_policy=self._policy,
            mp_policy=MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=self._reduced),
        )

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Keep whole gradients on each rank until the last backward pass scatters them."""
        if last and self._is_last:  # as at the start: these calls visit every module
            return nullcontext()
        self._is_last = last
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            if self._stage == 2:
                root.set_reshard_after_backward(last)
        return nullcontext()

    def describe(self, model: nn.Module) -> str:
        """Describe the all-gathers, reduce-scatters and all-reduces."""
        shards = self._mesh.size(-1)
        replicas = self._mesh.size() // shards
        whole = local_bytes(model) * shards
        trained = local_bytes(model, of_gradients=True) * shards
        messages = []
        if shards > 1:
            often = " (twice for each micro-batch)" if self._stage == 3 else ""
            gathered, kind = (whole // 2, " in bf16") if self._dtype else (whole, "")
            messages.append(f"all-gathers of {size(gathered)} of weights{kind}{often}")
            messages.append(f"reduce-scatters of {size(trained)} of gradients")
        if replicas > 1:
            messages.append(f"all-reduces of {size(trained / shards)} between the replicas")
        return f"Per step {', '.join(messages)}." if messages else ""


class ShardOptimizer(Part):
    """Stage 1: the optimizer state of each tensor is on one rank, which updates it for all."""

    changes_passes = False

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def check(self, model: nn.Module, _example: Batch) -> None:
        """Raise ConfigError if weights differ in their types, which torch's optimizer refuses."""
        types = sorted({str(one.dtype).removeprefix("torch.") for one in model.parameters()})
        if len(types) > 1:
            raise ConfigError(
                f"parallel.strategy=zero1 expects weights of one type, got {', '.join(types)}; "
                "choose ddp, zero2 or zero3"
            )

    def optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Divide the tensors over the ranks; each rank has an optimizer for its tensors."""

        def make_own(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return make([group for group in groups if group["params"]] or groups)

        return partial(
            _Zero1,
            optimizer_class=make_own,  # type: ignore[arg-type]  # it is called like a class
            process_group=self._mesh.get_group(),
        )

    def finish_with_nan(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Do nothing: no other rank waits in a forward or backward pass."""
        return True

    def describe(self, model: nn.Module) -> str:
        """Describe the broadcasts."""
        return (
            f"The optimizer state is divided over {self._mesh.size()} ranks by tensors; the ranks "
            f"broadcast {size(local_bytes(model, of_gradients=True))} of weights after each step."
        )


class _Zero1(ZeroRedundancyOptimizer):
    """Does not send frozen weights, as torch's does in every step (2.15).

    The optimizer of a rank lacks groups of which the rank has no tensor: torch cannot load them.
    """

    def _sync_param_groups(self: Any, source: Any, target: Any) -> None:
        own = self._partition_parameters()[self.rank]
        held = [number for number, group in enumerate(own) if group["params"]] or range(len(own))
        pairs = [
            [groups[number] for number in held] if groups is self.param_groups else groups
            for groups in (source, target)
        ]
        super()._sync_param_groups(*pairs)  # type: ignore[misc]

    def _broadcast_params_from_rank(self: Any, rank: int) -> list[Any]:
        source = dist.get_global_rank(self.process_group, rank)
        return [
            dist.broadcast(weight.data, source, self.process_group, async_op=True)
            for group in self._partition_parameters()[rank]
            for weight in group["params"]
            if weight.requires_grad
        ]


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's parameters, which holds the state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def has_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a weight; in stage 1 there may be fewer tensors than ranks."""
    return any(group["params"] for group in optimizer.param_groups)


def units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as one: the members of the outermost containers.

    Members without weights are left out. A model without containers has no units.
    """
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from units(child)


def _shares_weights(unit: nn.Module, model: nn.Module) -> bool:
    inside = set(unit.modules())
    others = [module for module in model.modules() if module not in inside]
    outside = {id(one) for module in others for one in module.parameters(recurse=False)}
    return any(id(weight) in outside for weight in unit.parameters())
