"""How does a step change the weights? The optimizer, and its learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.schema import Optim


def build(config: Optim, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    kind: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        config.name
    ]
    return kind(parameters, config.lr, weight_decay=config.weight_decay)


def learning_rate(config: Optim, step: int, total_steps: int) -> float:
    """The learning rate of the update number `step` (from 0): linear warm-up, then the schedule.

    A function of the step alone, so there is no scheduler to save. Cosine decay to zero follows
    Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
