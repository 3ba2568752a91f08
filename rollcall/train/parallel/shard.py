"""Sharding: ZeRO, https://arxiv.org/abs/1910.02054; FSDP2, https://arxiv.org/abs/2304.11277."""

import fnmatch
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from rollcall.config import ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.parallel.experts import Perceptrons, stacks_of
from rollcall.train.parallel.gradients import sum_gradients
from rollcall.train.parallel.part import MakeOptimizer, Part
from rollcall.train.ranks.device import local_of
from rollcall.train.torch_private import reduce_unused
from rollcall.train.torch_private.overrides import Zero1

TRACES = 65521
"""A prime above every trace: their squares, summed over ranks, are exact."""


class Shard(Part):
    """Stages 2 and 3: weights are sharded, and gathered by units; stage 2 keeps them for a step."""

    shards = True
    suspicion = "weights that are used outside the forward method of their module"

    def __init__(
        self,
        mesh: DeviceMesh,
        stage: int,
        offload: bool,
        gathers_bf16: bool,
        conditional: Sequence[str] = (),
        of_experts: DeviceMesh | None = None,
        accumulates: bool = True,
    ) -> None:
        """Shard over the last dimension of the mesh; a first dimension replicates the shards.

        With `gathers_bf16`, weights are gathered in bf16; gradients are still reduced in fp32. The
        weights that fit the patterns `conditional` stay whole; experts are sharded on their own
        mesh, if they have one. If a rank `accumulates`, gradients are scattered once a step.
        """
        self._mesh, self._of_experts = mesh, of_experts
        self._stage, self._accumulates = stage, accumulates
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        self._policy = pinned if offload else OffloadPolicy()
        self.rounds = gathers_bf16
        plain, mixed = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        self._formats = mixed if gathers_bf16 else plain  # of weights, and of gradients
        # The modules that are called; fully_shard has made them FSDPModules in place.
        self._roots: list[Any] = []
        self._whole: list[nn.Parameter] = []  # weights that are not sharded
        self._named: list[tuple[str, nn.Parameter]] = []  # all, once they are sharded
        self._patterns, self._conditional = conditional, set[nn.Parameter]()
        self._used: list[int] = []  # in how many steps, for each weight
        self._has_gradient = defaultdict[torch.Tensor, bool](bool)  # of weights of units, in a step
        self.zeros: list[Any] = []  # those without one in the newest step
        self._is_last = True
        # Which units this rank has gathered, in which order, and which weights it has used: all
        # ranks must do the same, or the shards of different weights are mixed up.
        self.calls: dict[str, int] = {}
        self.trace = 0
        self._names: dict[nn.Module, str] = {}

    def apply(self, model: nn.Module) -> None:
        """Shard every unit that shares no weights with others; `wrap` shards the rest as one."""
        named = dict(model.named_parameters())
        for pattern in self._patterns:
            if not (names := fnmatch.filter(named, pattern)):
                raise ConfigError(f"parallel.conditional: no weight of the model fits {pattern}")
            self._conditional |= {named[name] for name in names}
        modules = dict(model.named_modules())
        self._names = {module: name for name, module in modules.items()}
        if self._of_experts:  # cut along the second dimension, because the mesh cuts the first
            for stack in stacks_of(model).values():
                casts = isinstance(stack, Perceptrons)  # others get the router's weights in fp32
                self._shard(stack, self._of_experts, lambda _: Cut(1), casts)
        alone = {*units(model), *_further_units(model, modules)}
        every = [module for module in model.modules() if module in alone]
        last: Any = None
        # From the last one on, since a module comes before those in it, which must be first.
        for unit in [unit for unit in every[::-1] if not _shares_weights(unit, model)]:
            is_stack = isinstance(unit, FSDPModule)  # of experts
            if not is_stack and not self._conditional.issuperset(unit.parameters()):
                self._shard(unit, self._mesh)
                last = last or unit
        if last and self._stage == 3:  # its backward pass follows at once
            last.set_reshard_after_forward(False, recurse=False)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shard the remaining weights."""
        self._shard(module, self._mesh)
        self._roots.append(module)
        return module

    def _shard(
        self, module: nn.Module, mesh: DeviceMesh, cut: Any = None, casts: bool = True
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=cut,
            reshard_after_forward=self._stage == 3,
            offload_policy=self._policy,
            mp_policy=replace(self._formats, cast_forward_inputs=casts),
            ignored_params=_odd([*_left(module)]) | self._conditional,
        )
        name = self._names.get(module, "")
        # Zeros would be of another type than sums over micro-batches of 16 bits.
        if not (self.rounds and self._accumulates):
            reduce_unused(module, self._has_gradient)
        self.calls[name] = 0
        module.register_forward_pre_hook(partial(self._note, name, len(self.calls)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self, name: str, number: int, *_: Any) -> None:
        self.calls[name] += 1
        self.trace = (31 * self.trace + number) % TRACES

    def keep_piece(self, model: nn.Module) -> None:
        """Move weights that are not sharded to the device; with `cpu_offload`, shards stay."""
        device = torch.device(self._mesh.device_type)
        for weight in model.parameters():
            if not isinstance(weight, DTensor):
                weight.data = weight.data.to(device)

    def finish(self, model: nn.Module) -> None:
        """Average the gradients of weights that are not sharded."""
        if not self._named:  # after a backward pass all others are sharded again
            self._named = list(model.named_parameters())
            self._whole = [weight for _, weight in self._named if not isinstance(weight, DTensor)]
        if self._whole and self._mesh.size() > 1:
            groups = [self._mesh.get_group(number) for number in range(self._mesh.ndim)]
            sum_gradients(self._whole, groups, 1 / self._mesh.size())
        noted = self._has_gradient
        used = [noted.get(weight, weight.grad is not None) for _, weight in self._named]
        self._used = [*map(operator.add, self._used or used, used)]
        self.zeros = [weight for weight, is_used in noted.items() if not is_used]
        noted.clear()
        self.trace = hash((self.trace, *used)) % TRACES

    def drop_unused(self) -> None:
        """After the norm, which needs the same weights on all ranks, leave unused ones none."""
        for weight in self.zeros:
            # Other numbers than zeros are of a rank that has used it.
            if weight.grad is not None and not local_of(weight.grad).any():
                weight.grad = None

    def uses(self) -> dict[str, int]:
        """Return how often each unit was gathered, and how many steps have used each weight."""
        return self.calls | {n: used for (n, _), used in zip(self._named, self._used, strict=True)}

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Keep whole gradients on each rank until the last pass scatters them, if so asked."""
        if last and self._is_last:  # as at the start: these calls visit every module
            return nullcontext()
        self._is_last = last
        for root in self._roots:
            root.set_requires_gradient_sync(last or not self._accumulates)
            if self._stage == 2:
                root.set_reshard_after_backward(last)
        return nullcontext()


def _further_units(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that a model names in `shard_units`."""
    for name in getattr(model, "shard_units", ()):
        module = modules.get(name)
        if module is None or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"shard_units: '{name}' names no module of the model with a forward()"
            )
        yield module


def _left(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights below a module that no unit has sharded yet."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _left(child)


def _odd(weights: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """Return the weights that each rank keeps whole: FSDP2 cannot shard them beside others."""
    plain = [weight for weight in weights if not isinstance(weight, DTensor)]
    odd = {w for w in plain if not (w.ndim and w.numel() and w.is_contiguous()) or w.is_complex()}
    sizes: Counter[torch.dtype] = Counter()
    for weight in {*weights} - odd:
        sizes[weight.dtype] += weight.numel() if weight.requires_grad else 0
    most = max(sizes, key=sizes.__getitem__, default=None)
    return odd | {weight for weight in plain if weight.requires_grad and weight.dtype != most}


class ShardOptimizer(Part):
    """Stage 1: the optimizer state of each tensor is on one rank, which updates it for all."""

    changes_passes = False
    finishes_alone = True  # no other rank waits in a forward or backward pass

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

        kind: Any = make_own  # it is called like a class
        return partial(Zero1, optimizer_class=kind, process_group=self._mesh.get_group())


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of this rank's parameters, which holds the state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def with_weights(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer in a list if it has a weight; in stage 1 some ranks have none."""
    return [optimizer] if any(group["params"] for group in optimizer.param_groups) else []


def units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules gathered as one: members, with weights, of the outermost containers."""
    for child in module.children():
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)  # has no forward()
        if isinstance(module, nn.Sequential | nn.ModuleList) and not is_list:
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from units(child)


def _shares_weights(unit: nn.Module, model: nn.Module) -> bool:
    inside = set(unit.modules())
    others = [module for module in model.modules() if module not in inside]
    outside = {id(one) for module in others for one in module.parameters(recurse=False)}
    return any(id(weight) in outside for weight in unit.parameters())
