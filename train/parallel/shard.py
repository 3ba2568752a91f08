"""Each rank holds a share of the optimizer state, the gradients, the weights: the ZeRO family.

ZeRO, https://arxiv.org/abs/1910.02054; FSDP2, https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from train.parallel.part import MakeOptimizer, Part, local_bytes, size


class Shard(Part):
    """Stages 2 and 3: weights lie in shards and are gathered, unit by unit, when they are used.

    Stage 2 keeps them gathered from the first forward of a step to its last backward.
    """

    def __init__(self, mesh: DeviceMesh, stage: int, offload: bool) -> None:
        """Shard over the last dimension of the mesh; a first one holds replicas of the shards."""
        self._mesh = mesh
        self._stage = stage
        self._policy = (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        )
        # What is called: FSDPModules, which fully_shard makes of modules in place.
        self._roots: list[Any] = []

    def apply(self, model: nn.Module) -> None:
        """Shard every unit."""
        for unit in units(model):
            self._shard(unit)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard what is left."""
        self._shard(module)
        self._roots.append(module)
        return module

    def _shard(self, module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=self._stage == 3,
            offload_policy=self._policy,
        )

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Gradients stay whole on each rank until the last backward scatters them."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            if self._stage == 2:
                root.set_reshard_after_backward(last)
        return nullcontext()

    def describe(self, model: nn.Module) -> str:
        """The gathers, the scatters, and what the replicas add."""
        shards = self._mesh.size(-1)
        replicas = self._mesh.size() // shards
        whole = local_bytes(model) * shards
        travels = []
        if shards > 1:
            often = " (twice for each micro-batch)" if self._stage == 3 else ""
            travels.append(f"all-gathers of {size(whole)} of weights{often}")
            travels.append(f"reduce-scatters of {size(whole)} of gradients")
        if replicas > 1:
            travels.append(f"all-reduces of {size(whole / shards)} between the replicas")
        return f"Per step {', '.join(travels)}." if travels else ""


class ShardOptimizer(Part):
    """Stage 1: the state of each tensor is on one rank, which updates it for all."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Divide the tensors over the ranks, each with an optimizer for its own."""
        return partial(
            ZeroRedundancyOptimizer,
            optimizer_class=make,  # type: ignore[arg-type]  # it is called like the class
            process_group=self._mesh.get_group(),
        )

    def rejoin(self, model: nn.Module) -> bool:  # noqa: ARG002
        """No other rank waits in a forward or backward."""
        return True

    def describe(self, model: nn.Module) -> str:
        """The broadcasts."""
        return (
            f"The optimizer state is divided by tensors over {self._mesh.size()} ranks, which "
            f"broadcast {size(local_bytes(model))} of new weights after each step."
        )


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's own parameters, which alone has state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def units(module: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at once: the members of the outermost containers, such as blocks.

    Only those that have weights; a model without containers is one unit.
    """
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from units(child)
