"""Passes of the check before the first step, and sketches of what they compute."""

import itertools
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rollcall.train.ranks.device import local_of, whole_of
from rollcall.train.torch_private import is_mapped, tree_leaves, without_modes

SLACK = 16
"""The largest difference, in multiples of the expected rounding error of a sum."""
CALLS = 4
"""Calls of a module that are compared; later ones are repetitions, as for micro-batches."""


class Sketch(NamedTuple):
    """A tensor, multiplied by fixed numbers and summed over its last dimension."""

    shape: torch.Size
    sums: torch.Tensor
    norm: float
    turn: int = 0  # the number of an output's call in the pass
    first: int = 0  # the number of a gradient's first row on this rank


class Pass(NamedTuple):
    """The results of a pass, by the names of modules, weights and buffers."""

    outputs: dict[str, list[Sketch]]
    changed: dict[str, torch.Tensor]  # the weights and buffers that forward() has written to
    gradients: dict[str, Sketch]  # none of a forward pass without a backward pass
    loss: float = 0.0
    total: float = 0.0  # the sum of the losses
    weight: float = 1.0  # the sum of their weights
    change: float = 0.0  # the relative change of the losses beside others
    has_drawn: bool = False  # random numbers that differ in a piece of the samples
    is_random: bool = False  # any random numbers


@contextmanager
def outputs(model: nn.Module, of_modules: bool) -> Iterator[dict[str, list[Sketch]]]:
    """Collect sketches of the outputs of a model, and `of_modules` in it, while it is called.

    Modules that are only called have none.
    """
    outputs_of: dict[str, list[Sketch]] = {}  # by module
    turns, has_gradient = itertools.count(), torch.is_grad_enabled()

    def collect(name: str, _module: nn.Module, _inputs: object, outputs: Any) -> None:
        if torch.is_grad_enabled() != has_gradient:  # a pipeline passes zeros to learn the shapes
            return
        sketches = outputs_of.setdefault(name, [])
        for tensor in tree_leaves(outputs) if of_modules or not name else ():
            is_tensor = isinstance(tensor, torch.Tensor) and not is_mapped(tensor)
            if len(sketches) < CALLS and is_tensor:
                local = local_of(tensor)
                is_rows = local.layout is torch.strided or local.is_nested
                if local.is_floating_point() and is_rows:
                    with without_modes():  # under one, each operation takes 40 µs more
                        sketches.append(sketch(local)._replace(turn=next(turns)))

    hooks = [
        module.register_forward_hook(partial(collect, name))
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
    ]
    try:
        yield outputs_of
    finally:
        for hook in hooks:
            hook.remove()


def sketch(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a tensor."""
    tensor = tensor.values() if tensor.is_nested else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = tensor.detach().float()
    rows = rows.view(1) if rows.ndim == 0 else rows
    numbers = torch.arange(rows.shape[-1], device=rows.device).cos()
    return Sketch(rows.shape, rows @ numbers, float(torch.linalg.vector_norm(rows)))


@torch.no_grad()
def gradients(model: nn.Module, device: torch.device) -> dict[str, Sketch]:
    """Return sketches of this rank's rows of gradients; none before a backward pass."""
    sketches = dict[str, Sketch]()
    if all(weight.grad is None for weight in model.parameters()):
        return sketches
    for name, weight in model.named_parameters():
        gradient, first = weight if weight.grad is None else weight.grad, 0
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            mesh = weight.device_mesh
            first = -(-len(weight) // mesh.size()) * mesh.get_local_rank()
            rows = local_of(gradient)
        else:
            rows = whole_of(gradient)
        rows = torch.zeros_like(rows) if weight.grad is None else rows
        rows = rows.to_dense() if rows.is_sparse else rows
        rows = rows.reshape(-1, 1) if rows.ndim < 2 else rows
        sketches[name] = sketch(rows.to(device))._replace(first=first)  # some are on the CPU
    return sketches


def tolerance(model: nn.Module, formats: Collection[torch.dtype]) -> float:
    """Return the relative error that rounding may cause in numbers of these formats.

    In fp32, a sum of n terms in another order differs by about sqrt(n) * 2^-24 of its size, and the
    errors of successive layers add up likewise. Sums of other numbers are made in fp32.
    """
    layers = sum(1 for _ in model.modules())
    dtypes = {torch.float32, *(dtype for dtype in formats if dtype.is_floating_point)}
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    largest = max(max(weight.shape, default=1) for weight in model.parameters())
    terms = largest if epsilon < 1e-6 else 1
    return SLACK * epsilon * math.sqrt(terms * layers)
