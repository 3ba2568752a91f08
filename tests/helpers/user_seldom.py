"""A small classifier, and replicas of it that meet seldom, in plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

BATCH, SIZE, EVERY, DECAY = 16, 80, 5, 0.8
WORDS = [
    *("digits", "device=cpu", "data.name=user_seldom:points", f"data.global_batch={BATCH}"),
    *("model.name=user_seldom:Classifier", "log.every=1", "optim.name=adam", "optim.lr=0.02"),
    *(
        "optim.args.eps=0.01",
        "optim.clip_norm=0.5",
        f"optim.ema={DECAY}",
        "optim.schedule=constant",
    ),
    *("optim.weight_decay=0", "optim.warmup_steps=0", f"parallel.sync_every={EVERY}"),
]


def points() -> Any:
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE + 24, 6, generator=drawn)
    targets = (inputs.cumsum(1).abs() * 2).sum(1).long() % 4
    learned = targets[:SIZE].masked_fill(torch.rand(SIZE, generator=drawn) < 0.4, -100)
    return TensorDataset(inputs[:SIZE], learned), TensorDataset(inputs[SIZE:], targets[SIZE:])


def broken() -> Any:
    learned, validation = points()
    learned.tensors[0][7] = torch.nan
    return learned, validation


class Classifier(nn.Sequential):
    """Two layers; with CRASH=NUMBER in the environment, that forward pass kills the process."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        crash, self._passes = int(os.environ.get("CRASH", 0)), itertools.count(1)

        def wait(*_: Any) -> None:
            number = next(self._passes)
            if crash and number > crash / 2:
                time.sleep(0.03)  # so that a checkpoint gets its name
            if number == crash:
                os.kill(os.getpid(), signal.SIGKILL)

        self.register_forward_pre_hook(wait)


class Turned(Classifier):
    """The same, after a complex weight that is frozen in the middle of the second round."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.steps = nn.Parameter(torch.randn(6, dtype=torch.complex64)), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        self.turn.requires_grad_(self.steps < EVERY + 3)
        turned = inputs * self.turn
        outputs: torch.Tensor = super().forward(turned.real + turned.imag)  # type: ignore[no-untyped-call]
        return outputs


def mean_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).mean(0)


def by_hand(
    model: nn.Module,
    phases: list[tuple[int, int]],
    sync: str,
    data: Any = points,
    fragments: dict[int, list[str]] | None = None,
    overlap: int = 0,
) -> dict[str, Any]:
    """Return the losses and the state of replicas, as (replicas, last step) of each phase.

    The fragments are names of weights, by the steps into a round after which they are sent.
    """
    fragments = fragments or {0: [name for name, _ in model.named_parameters()]}
    under_way = list[tuple[int, list[str]]]()
    from rollcall.train.data.order import Order

    (inputs, targets), losses, first = data()[0].tensors, list[float](), 0
    order = Order(SIZE, phases[-1][1] * BATCH, BATCH, seed=0)
    mean, ema = copy.deepcopy(model), copy.deepcopy(model)
    anchor = copy.deepcopy(model)
    state: dict[str, Any] = {}
    rates: dict[str, Any] = (
        {"lr": 1.0} if sync == "local-sgd" else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    )
    outer = torch.optim.SGD(anchor.parameters(), **rates)
    for replicas, last in phases:
        models = [copy.deepcopy(mean) for _ in range(replicas)]
        optimizers = [torch.optim.Adam(one.parameters(), 0.02, eps=0.01) for one in models]
        for optimizer in optimizers if state else ():
            optimizer.load_state_dict(copy.deepcopy(state))
        for step in range(first, last):
            rows = torch.tensor(order.samples(step, range(BATCH))[0]).chunk(replicas)
            total = count = 0.0
            for one, optimizer, part in zip(models, optimizers, rows, strict=True):
                loss = functional.cross_entropy(one(inputs[part]), targets[part], reduction="sum")
                counted = int((targets[part] >= 0).sum())
                total, count = total + loss.item(), count + counted
                if not loss.isfinite():  # this replica alone skips the step
                    continue
                optimizer.zero_grad()
                (loss / counted).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                optimizer.step()
            losses += [total / count] if math.isfinite(total) else []
            for kept, *weights in _zip(ema, *models):
                kept.data.lerp_(mean_of(weights), 1 - DECAY)
            if sent := fragments.get((step + 1) % EVERY):
                outer.zero_grad()
                for name in sent:
                    old = anchor.get_parameter(name)
                    weights = [one.get_parameter(name) for one in models]
                    old.grad = old.detach() - mean_of(weights)
                outer.step()
                under_way.append((step + 1 + overlap, sent))
            arrived = [name for due, names in under_way if due == step + 1 for name in names]
            for one, name in itertools.product(models, arrived):
                weight, new = one.get_parameter(name), anchor.get_parameter(name).detach()
                weight.data = (weight.detach() + new) / 2 if overlap else new.clone()
        for target, *weights in _zip(mean, *models):
            target.data.copy_(mean_of(weights))
        states = [optimizer.state_dict() for optimizer in optimizers]
        state = copy.deepcopy(states[0])
        for number, values in state["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                values[name] = mean_of([one["state"][number][name] for one in states])
        first = last
    names = [name for name, _ in model.named_parameters()]
    moments = {n: outer.state[w].get("momentum_buffer") for n, w in anchor.named_parameters()}
    return {
        "losses": losses,
        "model": dict(mean.state_dict()),
        "ema": dict(ema.state_dict()),
        "anchor": dict(anchor.state_dict()),
        "momentum": {} if sync == "local-sgd" else moments,
        "replicas": [
            {
                "model": dict(one.state_dict()),
                "optim": {
                    f"state.{name}.exp_avg_sq": optimizer.state[weight]["exp_avg_sq"]
                    for name, weight in zip(names, one.parameters(), strict=True)
                },
            }
            for one, optimizer in zip(models, optimizers, strict=True)
        ],
    }


def _zip(*models: nn.Module) -> Any:
    return zip(*(model.parameters() for model in models), strict=True)
