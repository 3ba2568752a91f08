"""One dimension's way to spread a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.data.source import Batch

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Part:
    """What a part may change; the defaults change nothing. The verbs are called in this order.

    Attributes:
        places: whether `apply` takes the model to its devices; else it goes to the rank's device.
        warm_ups: backward passes before the first step, after which a step is like any other.
    """

    places = False
    warm_ups = 0

    def check(self, model: nn.Module, example: Batch) -> None:
        """Refuse a model or samples that do not fit, before anything is changed or written.

        Args:
            model: the whole model, on the CPU.
            example: a few samples, as the model takes them.

        Raises:
            ConfigError: says what does not fit, and what does.
        """

    def apply(self, model: nn.Module) -> None:
        """Change the modules in place; names of weights stay.

        Args:
            model: the whole model, or the layers of this rank's pipeline stages.
        """

    def wrap(self, module: nn.Module) -> nn.Module:
        """What is called in place of the model, or of each of the pipeline stages of this rank."""
        return module

    def optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Change how an optimizer is made."""
        return make

    def describe(self, model: nn.Module) -> str:  # noqa: ARG002
        """What this part communicates for the model it was applied to, as a sentence."""
        return ""

    def share(self, batch: Batch) -> Batch:
        """What this rank computes of samples that it has in common with other ranks."""
        return batch

    def around(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around every forward, and the backward that follows it.

        Args:
            last: whether it is the last one of a step, after which gradients travel.
        """
        return nullcontext()

    def finish(self, model: nn.Module) -> None:
        """Complete the gradients after the last backward of a step."""

    def rejoin(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Take part in what the others exchange, after a forward or backward that failed here.

        Returns:
            Whether it did: then every rank has a gradient that is not a number.
        """
        return False

    def forget(self) -> None:
        """Drop what a gradient that is not finite has left for the next step."""

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs of whole samples, from those of each rank's share."""
        return outputs


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


def nearest_multiples(number: int, degree: int) -> str:
    """The multiples of a degree on both sides of a number, for messages."""
    below = number // degree * degree
    return " or ".join(str(other) for other in (below, below + degree) if other)
