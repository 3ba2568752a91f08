"""Find what depends on the other samples of a batch, of which a rank sees only its own.

Two samples pass through the model together, and each of them alone.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollcall.messages.text import listed
from rollcall.train.exact import fingerprint
from rollcall.train.health.passes import Pass, Sketch
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.world import World
from rollcall.train.torch_private import BatchNorm


def dependence(
    whole: Pass, alone: Sequence[Pass], tolerance: float, of_outputs: bool
) -> tuple[str, float] | None:
    """Return the first module whose output differs, empty for the loss itself, and by how much.

    None if neither the loss nor the output of the model differs; `of_outputs` leaves out the loss.
    """
    total = sum(part.total for part in alone)
    size = sum(abs(part.total) for part in alone) or 1.0
    of_weight = abs(whole.weight - sum(part.weight for part in alone)) / (whole.weight or 1)
    error_of_loss = _largest([abs(whole.total - total) / size, whole.change, of_weight])
    if not math.isfinite(whole.total):
        return None
    different = {
        sketch.turn: (name, error)
        for name, calls in whole.outputs.items()
        for number, sketch in enumerate(calls)
        if not (error := _error(sketch, name, number, alone)) <= tolerance
    }
    names = {name for name, _ in different.values()}
    if (of_outputs or error_of_loss <= tolerance) and "" not in names:
        return None
    return different[min(different)] if different else ("", error_of_loss)


def _error(whole: Sketch, name: str, call: int, alone: Sequence[Pass]) -> float:
    """Return the relative difference of an output of a module from those of single samples.

    It is 0 if the output has no dimension for samples.
    """
    errors = [0.0]
    for number, sample in enumerate(alone):
        calls = sample.outputs.get(name, [])[call:]
        if not calls or len((part := calls[0]).shape) != len(whole.shape):
            continue
        sizes = enumerate(zip(part.shape[:-1], whole.shape[:-1], strict=True))
        cut = [axis for axis, (own_size, size) in sizes if own_size != size]
        if len(cut) == 1 and part.shape[cut[0]] * len(alone) == whole.shape[cut[0]]:
            piece = whole.sums.chunk(len(alone), cut[0])[number]
            errors.append(float((piece - part.sums).norm()) / (part.norm or 1))
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """Return the largest error, NaN if there is one."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def conditional(
    model: nn.Module, alone: Sequence[Pass], known: Sequence[str], world: World
) -> list[str]:
    """Return the weights of modules that some samples of the ranks call, unless patterns fit."""
    names = [name for name, _ in model.named_modules()]
    calls = torch.tensor([[name in part.outputs for name in names] for part in alone])
    by_any, by_all = world.gather(torch.stack([calls.any(0), calls.all(0)]).byte()).unbind(1)
    are_some = by_any.any(0) & ~by_all.all(0)
    some = sorted(name for name, is_some in zip(names, are_some, strict=True) if is_some)
    outermost = [name for name in some if not any(name.startswith(f"{n}.") for n in some)]
    patterns = {}
    for module in outermost:
        weights = [name for name, _ in model.get_submodule(module).named_parameters(prefix=module)]
        parent = module.rpartition(".")[0]
        is_list = isinstance(model.get_submodule(parent), nn.ModuleList | nn.ModuleDict)
        if any(not any(fnmatch.fnmatch(name, pattern) for pattern in known) for name in weights):
            patterns[f"{parent if parent and is_list else module}.*"] = True
    return list(patterns)


def combinations(
    model: nn.Module, whole: Pass, alone: Sequence[Pass], others: Sequence[Pass], tolerance: float
) -> dict[str, str | None]:
    """Return the tensors that forward() changes by what it sees, and how they add up over ranks.

    That is `mean` or `sum` of the changes, or empty if neither gives what all samples give; None if
    only the passes of `others` differ, which do not show it.
    """
    start = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ways_of, passes = dict[str, str | None](), [whole, *alone, *others]
    for name in dict.fromkeys(name for part in passes for name in part.changed):
        before = start[name].detach().double()
        expected, *parts = [part.changed.get(name, before).to(before) for part in passes]
        if any(part.shape != expected.shape for part in parts):
            ways_of[name] = ""
            continue
        scale = tolerance * float(before.norm() + expected.norm())
        total = sum((part - before for part in parts[: len(alone)]), torch.zeros_like(expected))
        values = [*parts, before + total / len(alone), before + total]
        *alike, is_mean, is_sum = [float((value - expected).norm()) <= scale for value in values]
        if not all(alike):
            way = "mean" if is_mean else "sum" if is_sum else ""
            ways_of[name] = None if all(alike[: len(alone)]) else way
    return ways_of


def sentence_of_tensors(ways: Mapping[str, str], buffers: set[str]) -> str:
    """Return a problem if ranks would change these tensors in different ways."""
    if not ways:
        return ""
    what = "weights" if {*ways} - buffers else "buffers"
    text = (
        f"forward() changes the {what} {listed([*ways])} by the samples that it sees, so each rank "
        "would have its own"
    )
    if all(ways.values()) and what == "buffers":
        names = ", ".join(f"{name}: {way}" for name, way in ways.items())
        return f"{text}: set model.sync_buffers={{{names}}}"
    return (
        f"{text}: let forward() add up what it changes them by, with torch.distributed, as in "
        "dist.all_reduce(counts)"
    )


def warning(strategy: Strategy, moved: Mapping[str, Any]) -> str:
    """Return a warning if ranks of other samples hold other values of what training has moved.

    Every rank calls it together. BatchNorm warns itself, and pieces of sequences have positions.
    """
    norms = {f"model.{n}" for n, m in strategy.model.named_modules() if isinstance(m, BatchNorm)}
    compared = ("train.loss.",) if "context" in strategy.degrees else ("train.loss.", "model.")
    mine = {}  # tensors of other shapes are no statistics
    for name, value in moved.items():
        tensor = torch.tensor(value) if isinstance(value, float) else value
        is_tensor = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if is_tensor and tensor.is_floating_point() and name.rpartition(".")[0] not in norms:
            mine[f"{name} {tensor.shape}"] = fingerprint.short(local_of(tensor))
    first, groups = strategy.world.broadcast(mine), strategy.replicas(["replicate", "shard"])
    is_alike = any({0, strategy.world.rank} <= {*group} for group in groups)
    names = {key.partition(" ")[0] for key in mine.keys() & first if mine[key] != first[key]}
    names = {name for name in names if name.startswith(compared)} if is_alike else set()
    different = strategy.world.first_problem(listed(sorted(names)))
    return different and (
        f"the ranks have different values of {different}, which training changes by the samples "
        "that each of them sees, so the result depends on the number of ranks, unless they are "
        "drawn at random or nothing is computed with them: set train.gather=true for a loss, "
        "model.sync_buffers for buffers, or add up the values over the ranks"
    )
