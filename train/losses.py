"""How wrong are the outputs? A loss for every sample, so that padding can weigh nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from train.plugin import load_attribute
from train.schema import ConfigError

if TYPE_CHECKING:
    from train.precision import Scaler

PerSample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def per_sample_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each sample: (rows, …, classes) and (rows, …) to (rows,)."""
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each sample: outputs of the shape of the targets to (rows,).

    Raises:
        ConfigError: the shapes differ.
    """
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"train.loss=mse compares numbers, but the outputs have shape {tuple(outputs.shape)} "
            f"and the targets {tuple(targets.shape)}: is it a classification? Then leave train.loss"
            " out"
        )
    return (outputs - targets).square().flatten(1).mean(1)


LOSSES: dict[str, PerSample] = {"cross_entropy": per_sample_loss, "mse": squared_error}


def build(name: str) -> PerSample:
    """The loss that `train.loss` names: one of these, or the user's package.module:attribute.

    A user's own is called with (outputs, targets) of some rows and returns (rows,), the loss of
    each. It must not mix rows, since a batch is cut and padded.

    Raises:
        ConfigError: there is no such loss; when it is called, its result has another shape.
    """
    if name in LOSSES:
        return LOSSES[name]
    loss: PerSample = load_attribute(name, "train.loss", LOSSES)

    def checked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = loss(outputs, targets)
        if not isinstance(losses, torch.Tensor) or losses.shape != targets.shape[:1]:
            found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses)
            raise ConfigError(
                f"train.loss={name} must return the loss of each sample, a tensor of shape "
                f"({len(targets)},), not {found}: leave out its mean over the batch"
            )
        return losses

    return checked


class Objective:
    """The loss as a training step sees it: every rank learns of a number that is not finite.

    A loss that is not finite makes the gradient NaN, and the gradient is what ranks exchange
    anyway: so its norm tells all of them, whatever the strategy.

    Attributes:
        per_sample: the loss itself.
        scaler: of fp16, by which gradients are enlarged; None in other number formats.
        seen: set to a list, it collects the losses of every call.
    """

    def __init__(self, per_sample: PerSample, scaler: Scaler | None = None) -> None:
        self.per_sample = per_sample
        self.scaler = scaler
        self.seen: list[torch.Tensor] | None = None

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each row, not scaled; its gradient is."""
        losses = self.per_sample(outputs, targets)
        if self.seen is not None:
            self.seen.append(losses.detach())
        scale = self.scaler.scale if self.scaler else torch.ones((), device=losses.device)
        scaled: torch.Tensor = _Guarded.apply(losses, scale)
        return scaled


class _Guarded(torch.autograd.Function):
    """Passes losses on; their gradient times the scale, NaN where a loss is not finite."""

    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(losses, scale)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        losses, scale = ctx.saved_tensors
        return gradients[0] * (scale + 0 * losses), None
