"""Buffers that follow the data: the ranks add up what forward() has changed in them."""

import fnmatch
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.parallel.part import Part, flatten, unflatten
from rollcall.train.torch_private import buffers_of


class SharedBuffers(Part):
    """Adds up the changes of a step over the ranks, as a mean or a sum."""

    changes_passes = False

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
                for name, module in model.named_modules()
                for leaf, _ in module.named_buffers(recurse=False)
                if fnmatch.fnmatch(f"{name}.{leaf}".lstrip("."), pattern)
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
    def finish(self, model: nn.Module) -> bool:  # noqa: ARG002
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
        return False

    def finish_with_nan(self, model: nn.Module) -> bool:
        """Send what this rank has changed; the step is skipped."""
        self.finish(model)
        return True
