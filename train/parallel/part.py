"""One dimension's way to spread a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Part:
    """What a part may change; the defaults change nothing.

    Attributes:
        warm_ups: backward passes before the first step, after which a step is like any other.
    """

    warm_ups = 0

    def apply(self, model: nn.Module) -> nn.Module:
        """Spread the model, whose names stay; return what is called in its place."""
        return model

    def accumulating(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around forward and backward of a micro-batch: gradients travel after the last alone."""
        return nullcontext()

    def optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Change how an optimizer is made."""
        return make

    def describe(self, model: nn.Module) -> str:  # noqa: ARG002
        """What this part communicates for the model it was applied to, as a sentence."""
        return ""


def local_bytes(module: nn.Module) -> int:
    """Bytes of the weights that this rank holds."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in module.parameters()
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
