"""The learning rate of each step.

Each function returns a fraction of the peak, from 1 to `optim.min_lr_ratio`. It receives `step`,
from 0, and `steps`, the number of steps after the warm-up.
"""

import inspect
import math
from numbers import Real

import torch

from rollcall.config import arguments
from rollcall.config.schema import Config, ConfigError, Optim


def constant(step: int, steps: int) -> float:  # noqa: ARG001
    """Return 1."""
    return 1.0


def cosine(step: int, steps: int, config: Optim) -> float:
    """Decay along half a cosine: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983."""
    return _above(config, 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))


def linear(step: int, steps: int, config: Optim) -> float:
    """Decay along a line."""
    return _above(config, 1 - step / max(1, steps))


def wsd(step: int, steps: int, config: Optim) -> float:
    """Stay, then decay (warm up, stay, decay): Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395."""
    return _above(config, min(1.0, (1 - step / max(1, steps)) / config.decay_fraction))


def _above(config: Optim, fraction: float) -> float:
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fraction


def peak(config: Config) -> float:
    """Return the largest learning rate, for this global batch.

    Linear: Goyal et al., https://arxiv.org/abs/1706.02677. Square root, for Adam: Malladi et al.,
    https://arxiv.org/abs/2205.10287.
    """
    if config.optim.base_batch is None:
        return config.optim.lr
    ratio = config.data.global_batch / config.optim.base_batch
    return config.optim.lr * (math.sqrt(ratio) if config.optim.lr_scaling == "sqrt" else ratio)


class Schedule:
    """The learning rate of each step (from 0): linear warm-up, then the schedule."""

    def __init__(self, config: Config) -> None:
        options = config.optim
        self._config, self._peak = config, peak(config)
        self._function = arguments.call(
            "optim.schedule", "optim.schedule_args", options.schedule, options.schedule_args
        )
        takes_config = "config" in inspect.signature(self._function).parameters
        self._given = {"config": options} if takes_config else {}

    def __call__(self, step: int, total_steps: int) -> float:
        """Return the rate of a step; raise ConfigError if the user's schedule returns no number."""
        options, highest = self._config.optim, self._peak
        if step < options.warmup_steps:
            return highest * (step + 1) / options.warmup_steps
        past, steps = step - options.warmup_steps, total_steps - options.warmup_steps
        fraction = self._function(past, steps, **self._given)
        if not isinstance(fraction, float | Real) or not 0 <= float(fraction) < math.inf:
            raise ConfigError(
                f"optim.schedule={options.schedule}: expected a finite number of at least 0, the "
                f"fraction of the peak rate, for step={past} and steps={steps}, got {fraction!r}"
            )
        return highest * float(fraction)


def ratios(config: Optim, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group of a new optimizer, relative to `optim.lr`."""
    return [group.get("lr", config.lr) / config.lr for group in optimizer.param_groups]
