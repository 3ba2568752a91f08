"""The layers of a model, the cost of each, and how to divide them evenly."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rollcall.config.schema import ConfigError
from rollcall.train.parallel.part import evaluating
from rollcall.train.ranks.device import synchronize
from rollcall.train.ranks.world import World

Groups = Sequence[dict[str, nn.Module]]
TIMED = 5
"""Forward passes per measurement; the fastest counts."""


class LayerGroup(NamedTuple):
    """A layer with weights, and the layers without weights that follow it."""

    layers: dict[str, nn.Module]  # by their names in the model
    cost: int  # of a forward pass, in floating-point operations or microseconds


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers which, called one after the other, equal the model's forward pass.

    They are the children of an nn.Sequential, or what the method `pipeline_layers()` of the model
    returns: submodules by name, in order. Raise ConfigError if the model has neither, or if layers
    share weights or do not hold all.
    """
    own: Any = getattr(model, "pipeline_layers", None)
    modules = dict(model.named_modules(remove_duplicate=False))  # an activation may be used twice
    if own is not None:
        layers: dict[str, nn.Module] = dict(own())
        for name in layers:
            if modules.get(name) is not layers[name]:
                raise ConfigError(
                    f"pipeline_layers() of {type(model).__name__} returns '{name}', but the model "
                    "has no such submodule, or another one"
                )
    elif isinstance(model, nn.Sequential):
        layers = {name: module for name, module in modules.items() if name and "." not in name}
    else:
        raise ConfigError(
            f"a {type(model).__name__} cannot be divided into layers: expected an nn.Sequential "
            "or a method pipeline_layers()"
        )
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        tensors = [*layer.parameters(), *layer.buffers()]
        for tensor in tensors:
            if id(tensor) in owners:
                raise ConfigError(
                    f"layers {owners[id(tensor)]} and {name} share weights, so a pipeline cannot "
                    "divide them: merge the layers, or give each its own weights"
                )
        owners |= {id(tensor): name for tensor in tensors}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in owners:
            raise ConfigError(
                f"no layer of pipeline_layers() has the weight {name}; every weight must be in one"
            )
    return layers


def groups_of(model: nn.Module, example: torch.Tensor, world: World, by: str) -> list[LayerGroup]:
    """Return groups of layers and their costs for a sample: `flops`, or the `time` on rank 0."""
    groups: list[dict[str, nn.Module]] = [{}]
    has_weights = False
    for name, layer in layers_of(model).items():
        is_weighted = any(True for _ in layer.parameters())
        if is_weighted and has_weights:
            groups.append({})
        has_weights = has_weights or is_weighted
        groups[-1][name] = layer
    home = next(model.parameters()).device  # the meta device has shapes, which are enough
    with evaluating(model):
        costs = _counted(groups, example.to(home))
        if by == "time":
            costs = world.broadcast(world.is_main and _timed(groups, example, world.device))
    return [LayerGroup(*group) for group in zip(groups, costs, strict=True)]


def balance(costs: Sequence[int], parts: int) -> list[int]:
    """Return the bounds of consecutive parts that minimize the largest cost of a part."""

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
    """Name a range of neighboring layers."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


@torch.no_grad()
def _counted(groups: Groups, x: torch.Tensor) -> list[int]:
    operations = []
    for group in groups:
        with FlopCounterMode(display=False) as counter:
            for name, layer in group.items():
                try:
                    x = layer(x)
                except Exception as error:  # a layer may raise anything
                    needs_values = "meta" in str(error)
                    if not (needs_values or isinstance(error, RuntimeError)):
                        raise
                    what = "depends on values" if needs_values else "fails without them"
                    raise ConfigError(
                        "a pipeline needs the shapes of a model before its weights exist, but the "
                        f"forward() of layer {name} {what}: choose ddp or a zero "
                        f"strategy ({str(error).strip().splitlines()[0]})"
                    ) from error
        operations.append(counter.get_total_flops())
    return operations


@torch.no_grad()
def _timed(groups: Groups, x: torch.Tensor, device: torch.device) -> list[int]:
    """Measure the microseconds of each group; the device holds one group at a time."""
    costs = []
    x = x.to(device)
    for group in groups:
        stack = nn.Sequential(*group.values())
        is_empty = any(weight.is_meta for weight in stack.parameters())
        stack.to_empty(device=device) if is_empty else stack.to(device)
        times = []
        for _ in range(TIMED):
            started = time.perf_counter()
            y = stack(x)
            synchronize(device)
            times.append(time.perf_counter() - started)
        stack.to("meta" if is_empty else "cpu")
        x = y
        costs.append(round(min(times) * 1e6))
    return costs
