"""The learning rate after the warm-up, as a fraction of the peak, from 1 to `optim.min_lr_ratio`.

Each function receives `step`, from 0, and `steps`, the number of steps after the warm-up.
"""

import math

from rollcall.config.schema import Optim


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
