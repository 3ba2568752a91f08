"""Values that ranks share beside gradients: outputs, for a loss of all, and changes of buffers."""

import fnmatch
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.parallel.part import Part, flatten, named_buffers, unflatten
from rollcall.train.torch_private import buffers_of, tree_map_only


class _Rows(torch.autograd.Function):
    """The rows of all ranks. A rank's gradient is the sum of what all ranks' losses give it."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(every, rows.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def of_all_ranks(outputs: Any, batch: Batch) -> tuple[Any, Batch]:
    """Return the outputs and the batch of all ranks; only this rank's rows have weights."""
    whole: Batch = batch._replace(inputs=outputs).map(_Rows.apply)
    weights = torch.zeros_like(whole.weights)
    first = dist.get_rank() * len(batch.weights)
    weights[first : first + len(batch.weights)] = batch.weights
    if not bool((whole.weights > 0).all()):
        real = whole.weights > 0
        outputs = tree_map_only(torch.Tensor, lambda rows: rows[real], whole.inputs)
        targets = tree_map_only(torch.Tensor, lambda rows: rows[real], whole.targets)
        return outputs, Batch(outputs, targets, weights[real])
    return whole.inputs, whole._replace(weights=weights)


def twice(outputs: Any, batch: Batch) -> tuple[Any, Batch]:
    """Return the rows with a copy of each: also of two rows, every one then has others like it."""
    both: Batch = batch._replace(inputs=outputs).map(lambda rows: torch.cat([rows, rows]))
    return both.inputs, both


def joined(outputs: torch.Tensor, others: torch.Tensor, batch: Batch) -> tuple[Any, Batch]:
    """Return the rows twice, with other outputs for the copies."""
    return torch.cat([outputs, others]), twice(outputs, batch)[1]


class SharedBuffers(Part):
    """Adds up the changes of a step over the ranks, as a mean or a sum."""

    changes_passes = False
    finishes_alone = True

    def __init__(self, ways: Mapping[str, str], shares: int) -> None:
        """Add up by `ways`, mean or sum by pattern; `shares` ranks see different samples."""
        self._ways, self._shares = ways, shares
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        self._before: list[torch.Tensor] | None = None  # at the start of a step

    def check(self, model: nn.Module, _example: Batch) -> None:
        """Find the buffers; raise ConfigError for a pattern that fits none."""
        for pattern, way in self._ways.items():
            matches = [
                (buffers_of(module), leaf, way)
                for name, module, leaf in named_buffers(model)
                if fnmatch.fnmatch(name, pattern)
            ]
            if not matches:
                raise ConfigError(f"model.sync_buffers: no buffer of the model fits {pattern}")
            self._buffers += matches

    def around(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Copy the buffers before the first pass of a step."""
        if self._before is None and torch.is_grad_enabled():  # no evaluation
            self._before = [buffers[name].clone() for buffers, name, _ in self._buffers]
        return nullcontext()

    @torch.no_grad()
    def finish(self, model: nn.Module) -> None:  # noqa: ARG002
        """Add up the changes, in one message for each device."""
        before, self._before = self._before or [], None
        pairs = list(zip(self._buffers, before, strict=True))
        changes = [(buffers[name] - old).double() for (buffers, name, _), old in pairs]
        vectors = flatten(changes)
        for vector in vectors:
            dist.all_reduce(vector)
        totals = unflatten(vectors, changes)
        for ((buffers, name, way), old), total in zip(pairs, totals, strict=True):
            share = (1 if way == "mean" else self._shares) / dist.get_world_size()
            buffers[name].copy_(old + total * share)
