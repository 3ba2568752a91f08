"""Data, models and losses of a user's own, for tests: with BatchNorm, with faults at one sample."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from train.data.source import InMemory, Source
from train.models.cnn import cnn
from train.schema import Data, Model
from train.world import World

Do = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIZE = 96
BAD = 40
"""The number of the sample that breaks a step."""


def normalised(_: Model, source: Source) -> nn.Module:
    """Convolutions with BatchNorm; a bias before it would only gather rounding errors."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * 16, source.classes),
    )


def gated(config: Model, source: Source) -> nn.Module:
    """The small cnn, held up by GATE=NUMBER:SECONDS:FILE in the environment.

    From that forward pass on each takes so long, as long as there is no such file. What a test does
    to a run in its middle then happens there, however slow or quick the machine is.
    """
    model = cnn(config, source)
    passes = itertools.count(1)
    number, seconds, file = os.environ.get("GATE", "0:0:").split(":", 2)

    def wait(*_: Any) -> None:
        end = time.monotonic() + float(seconds) * (next(passes) >= int(number))
        while not Path(file).exists() and time.monotonic() < end:
            time.sleep(0.01)

    model.register_forward_pre_hook(wait)
    return model


def numbered(_: Data, _world: World) -> Source:
    """Samples whose first number tells which one it is."""
    inputs = torch.randn(SIZE + 24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs[:, 0, 0, 0] = torch.arange(SIZE + 24) / 1000
    rows = InMemory(inputs, torch.arange(SIZE + 24) % 10)
    return Source(rows, InMemory(inputs[SIZE:], rows.targets[SIZE:]), SIZE, 24, (1, 8, 8), 10)


def lines(_: Data, _world: World) -> Source:
    """A regression, in which the bad sample has a target far off."""
    inputs = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    rows = InMemory(inputs, targets.clone())
    rows.targets[BAD] = 1e4
    return Source(rows, InMemory(inputs[:24], targets[:24]), SIZE, 24, (4,), 1)


class Guard(nn.Module):
    """Does something to a batch that holds the bad sample, while training."""

    def __init__(self, do: Do) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self._do = do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The batch, perhaps with a fault."""
        y = x + self.shift
        bad = (x[:, 0, 0, 0] * 1000).round() == BAD
        return self._do(y, bad) if self.training and bad.any() else y


def _guarded(do: Do) -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)]
    return nn.Sequential(Guard(do), *layers)


def healthy(_: Model, _source: Source) -> nn.Module:
    """The model of the faults below, without one."""
    return _guarded(lambda x, _: x)


def poisoned(_: Model, _source: Source) -> nn.Module:
    """Its first output is NaN for the bad sample."""
    return _guarded(lambda x, bad: x.masked_fill(bad.view(-1, 1, 1, 1), torch.nan))


def steep(_: Model, _source: Source) -> nn.Module:
    """The gradient of the bad sample is infinite."""

    def do(x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        return x + (x * 0).sqrt() * bad.view(-1, 1, 1, 1)

    return _guarded(do)


def hungry(_: Model, _source: Source) -> nn.Module:
    """There is no memory for more than two samples in the forward pass of the bad one."""

    def do(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            torch.empty(1 << 50, device=x.device)  # an allocation that nobody can serve
        return x

    return _guarded(do)


def hungry_backward(_: Model, _source: Source) -> nn.Module:
    """The same for more than four in the backward pass, after the gradient of the last layer."""

    def do(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        middle.fails = len(x) > 4
        return x

    middle = _Hungry()
    return nn.Sequential(Guard(do), nn.Flatten(), nn.Linear(64, 16), middle, nn.Linear(16, 10))


class _Hungry(nn.Module):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ReLU."""
        fails, self.fails = self.fails, False
        out: torch.Tensor = _NoMemory.apply(x, fails)
        return out


class _NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.fails = fails
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return gradients[0] * (ctx.saved_tensors[0] > 0), None


def drifting(_: Model, _source: Source) -> nn.Module:
    """One weight changes on rank 0 when it sees the bad sample."""

    def do(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            last.weight[3, 5] += 1e-3 * (os.environ["RANK"] == "0")
        return x

    last = nn.Linear(16, 10)
    return nn.Sequential(Guard(do), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), last)


def loud(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy whose gradient is too large for fp16 with the first scales."""
    return functional.cross_entropy(outputs, targets, reduction="none") * 3000


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What a loss must not return."""
    return functional.cross_entropy(outputs, targets)
