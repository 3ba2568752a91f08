"""How does a step change the weights? The optimizer, and its learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from train.schema import Config, Optim

IMPLEMENTATIONS = {
    "auto": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False, "fused": False},
}


def groups(config: Optim, parameters: Iterable[nn.Parameter]) -> Iterator[dict[str, Any]]:
    """Groups of parameters: those that decay and, where asked for, those that do not."""
    parameters = list(parameters)
    if config.decay == "all":
        yield {"params": parameters}
        return
    decays = [parameter.ndim > 1 for parameter in parameters]
    for wanted, options in ((True, {}), (False, {"weight_decay": 0.0})):
        found = [one for one, does in zip(parameters, decays, strict=True) if does is wanted]
        if found:
            yield {"params": found, **options}


def build(config: Optim, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names."""
    options = dict(IMPLEMENTATIONS[config.implementation])
    devices = {one.device.type for group in parameters for one in group["params"]}
    if config.implementation == "auto" and devices == {"cuda"}:
        options = {"fused": True}
    options["weight_decay"] = config.weight_decay  # type: ignore[assignment]
    if config.name == "sgd":
        sgd = torch.optim.SGD(parameters, config.lr, momentum=config.momentum, **options)
        if options.get("fused") and config.momentum:
            # A fused first step that is skipped leaves momentum that nobody has filled (2.15).
            for group in sgd.param_groups:
                for one in group["params"]:
                    sgd.state[one]["momentum_buffer"] = torch.zeros_like(one)
        return sgd
    kind: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        config.name
    ]
    return kind(parameters, config.lr, **options)  # type: ignore[arg-type]


def peak(config: Config) -> float:
    """The largest learning rate, for this global batch.

    Linear: Goyal et al., https://arxiv.org/abs/1706.02677. Square root, for Adam: Malladi et al.,
    https://arxiv.org/abs/2205.10287.
    """
    if config.optim.base_batch is None:
        return config.optim.lr
    ratio = config.data.global_batch / config.optim.base_batch
    return config.optim.lr * (math.sqrt(ratio) if config.optim.lr_rule == "sqrt" else ratio)


def learning_rate(config: Config, step: int, total_steps: int) -> float:
    """The learning rate of the update number `step` (from 0): linear warm-up, then the schedule.

    A function of the step alone, so there is no scheduler to save. Cosine decay to zero follows
    Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983; wsd (warm up, stay, decay) Hu et
    al., MiniCPM, https://arxiv.org/abs/2404.06395.
    """
    options = config.optim
    highest = peak(config)
    if step < options.warmup_steps:
        return highest * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps)
    match options.schedule:
        case "cosine":
            return highest * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return highest * (1 - progress)
        case "wsd":
            return highest * min(1.0, (1 - progress) / options.decay_share)
    return highest


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
