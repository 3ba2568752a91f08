"""Two networks that train in turn, and the same in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

WIDTH, NOISE, BATCH = 4, 3, 12
RATES, DECAY = {"critic": 0.02, "generator": 0.05}, 0.9
WORDS = [
    *("digits", "device=cpu", "data.name=user_gan:points", f"data.global_batch={BATCH}"),
    *("model.name=user_gan:Networks", "train.loss=user_gan:Gan", "log.every=1"),
    *("optim.name=adam", "optim.args.eps=0.01", "optim.weight_decay=0", f"optim.ema={DECAY}"),
    *("optim.schedule=constant", "optim.warmup_steps=0", "train.evaluate_every=null"),
    'optim.groups={"critic.*": {lr: 0.02}, "generator.*": {lr: 0.05, optimizer: sgd}}',
]


def points() -> Any:
    drawn = torch.Generator().manual_seed(6)
    real = torch.randn(84, WIDTH, generator=drawn).cumsum(1)
    noise = torch.randn(84, NOISE, generator=drawn)
    return TensorDataset(real[:60], noise[:60]), TensorDataset(real[60:], noise[60:])


class Networks(nn.Module):
    """A generator, and a critic with spectral norms."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(
            spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1))
        )


class Shared(Networks):
    """Has a weight outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Gan:
    """Two steps of the critic for one of the generator."""

    turns: tuple[str, ...] = ("critic", "critic", "generator")

    def __call__(self, model: Any, batch: Any, turn: str) -> Any:
        real, noise = batch
        drawn = model.generator(noise)
        if turn == "generator":
            losses = functional.softplus(-model.critic(drawn))
        else:
            losses = functional.softplus(-model.critic(real))
            losses = losses + functional.softplus(model.critic(drawn.detach()))
        return losses.sum(), len(real)

    def samples(self, model: Any) -> torch.Tensor:
        images: torch.Tensor = model.generator(torch.randn(5, NOISE)).view(5, 1, 2, 2).sigmoid()
        return images


class Misspelt(Gan):
    """Names a network that the model does not have."""

    turns = ("critic", "generater")


class Forgetful(Gan):
    """Does not say whose turn comes when."""

    turns = ()


class Broken(Gan):
    """Is NaN in a step of the generator."""

    steps = 0

    def __call__(self, model: Any, batch: Any, turn: str) -> Any:
        total, count = super().__call__(model, batch, turn)
        is_bad = turn == "generator" and batch[0][0, 0] > 0 and torch.is_grad_enabled()
        return total * torch.nan if is_bad else total, count


def by_hand(model: Any, steps: int, gan: Gan | None = None) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a plain loop, and the moving averages and weights at its end."""
    from rollcall.train.data.order import Order

    gan, (real, noise) = gan or Gan(), points()[0].tensors
    optimizers: dict[str, torch.optim.Optimizer] = {
        "critic": torch.optim.Adam(model.critic.parameters(), RATES["critic"], eps=0.01),
        "generator": torch.optim.SGD(model.generator.parameters(), RATES["generator"], 0.9),
    }
    average = copy.deepcopy(model.generator)
    order, losses = Order(60, steps * BATCH, BATCH, seed=0), []
    for step in range(steps):
        rows = torch.tensor(order.samples(step, range(BATCH))[0])
        turn = ("critic", "critic", "generator")[step % 3]
        before = [buffer.clone() for buffer in model.buffers()]
        total, count = gan(model, (real[rows], noise[rows]), turn)
        mean = total / count
        model.zero_grad()
        mean.backward()
        losses.append(mean.item())
        if not mean.isfinite():  # a skipped step
            for buffer, kept in zip(model.buffers(), before, strict=True):
                buffer.copy_(kept)
            continue
        optimizers[turn].step()
        if turn == "generator":
            for kept, weight in zip(
                average.parameters(), model.generator.parameters(), strict=True
            ):
                kept.data.lerp_(weight.data, 1 - DECAY)
    averages = {f"generator.{name}": weight for name, weight in average.named_parameters()}
    return losses, {"ema": averages, "model": dict(model.state_dict())}
