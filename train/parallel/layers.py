"""Of which layers does a model consist, what does each cost, and where is it best cut?"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from train.schema import ConfigError
from train.world import World

TIMED = 5
"""Forward passes of which the fastest counts."""


class Group(NamedTuple):
    """A layer with weights and those without that follow it.

    Attributes:
        layers: by their names in the model.
        cost: of a forward pass, in floating-point operations or microseconds.
        numbers: that it puts out for one sample.
    """

    layers: dict[str, nn.Module]
    cost: int
    numbers: int

    @property
    def names(self) -> list[str]:
        """Of its layers."""
        return list(self.layers)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers which, called one after the other, are the model's forward.

    Those of an nn.Sequential, or what the model's own `pipeline_layers()` returns: its submodules
    by their names in it, in order.

    Raises:
        ConfigError: the model is neither, or its layers share or leave out weights.
    """
    own: Any = getattr(model, "pipeline_layers", None)
    if own is not None:
        layers: dict[str, nn.Module] = dict(own())
        for name, layer in layers.items():
            if dict(model.named_modules()).get(name) is not layer:
                raise ConfigError(
                    f"pipeline_layers() of {type(model).__name__} calls a layer '{name}', which is "
                    "not its name in the model"
                )
    elif isinstance(model, nn.Sequential):
        layers = dict(model.named_children())
    else:
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut into layers: it must be an nn.Sequential or "
            "have a method pipeline_layers()"
        )
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if id(tensor) in owners:
                raise ConfigError(
                    f"layers {owners[id(tensor)]} and {name} share weights, so the model cannot be "
                    "cut between them: let one layer hold both, or give each its own"
                )
        owners |= {id(tensor): name for tensor in (*layer.parameters(), *layer.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in owners:
            raise ConfigError(
                f"no layer of pipeline_layers() holds {name}: every weight must be in one"
            )
    return layers


def groups_of(model: nn.Module, example: torch.Tensor, world: World, by: str) -> list[Group]:
    """The layers in groups that have weights, with their costs; the same on every rank.

    Args:
        example: inputs of one sample.
        by: flops counts operations; time measures on rank 0's device.

    Raises:
        ConfigError: the model cannot be cut into layers.
    """
    groups = [OrderedDict[str, nn.Module]()]
    has_weights = False
    for name, layer in layers_of(model).items():
        weighs = any(True for _ in layer.parameters())
        if weighs and has_weights:
            groups.append(OrderedDict())
        has_weights = has_weights or weighs
        groups[-1][name] = layer
    training = model.training
    model.eval()
    costs, numbers = _counted(groups, example)
    if by == "time":
        text = json.dumps(_timed(groups, example, world.device)) if world.is_main else ""
        costs = json.loads(world.broadcast_text(text))
    model.train(training)
    return [Group(*group) for group in zip(groups, costs, numbers, strict=True)]


def balance(costs: Sequence[int], parts: int) -> list[int]:
    """Bounds of consecutive parts whose largest cost is as small as it can be."""

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (len(costs),)
        return min(
            (max(sum(costs[start:cut]), best(cut, left - 1)[0]), (cut, *best(cut, left - 1)[1]))
            for cut in range(start + 1, len(costs) - left + 2)
        )

    return [0, *best(0, parts)[1]]


def span(layers: Sequence[str]) -> str:
    """Neighbouring layers in words."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def remove(model: nn.Module, names: Sequence[str]) -> None:
    """Take these layers out of the model; the others keep their names."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())


@torch.no_grad()
def _counted(
    groups: Sequence[OrderedDict[str, nn.Module]], x: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Floating-point operations of each group for the sample, and numbers it puts out."""
    operations, numbers = [], []
    for group in groups:
        with FlopCounterMode(display=False) as counter:
            for layer in group.values():
                x = layer(x)
        operations.append(counter.get_total_flops())
        numbers.append(x.numel())
    return operations, numbers


@torch.no_grad()
def _timed(
    groups: Sequence[OrderedDict[str, nn.Module]], x: torch.Tensor, device: torch.device
) -> list[int]:
    """Microseconds of each group; on the device there is only one at a time."""
    costs = []
    x = x.to(device)
    for group in groups:
        stack = nn.Sequential(*group.values()).to(device)
        times = []
        for _ in range(TIMED):
            started = time.perf_counter()
            y = stack(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        stack.cpu()
        x = y
        costs.append(round(min(times) * 1e6))
    return costs
