"""The loss that a model computes itself, as the models of Hugging Face do."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from rollcall.config.schema import ConfigError
from rollcall.train.numerics.cross_entropy import IGNORED
from rollcall.train.numerics.losses import are_valid

CLOSE = 1e-5
"""Relative difference of two means of the same losses."""


class ModelLoss:
    """Takes the `.loss` of what the model returns, a mean, times the number of targets in it."""

    def __init__(self, counts: Literal["", "labels", "next", "rows"] = "") -> None:
        """Take it for a mean over what `counts` names.

        Args:
            counts: all labels but -100; the same without the first of each row, when each label is
                predicted from those before it; or the rows. By default the logits must show it.
        """
        self.counts: str = counts
        self._is_seen = False  # whether a loss was compared with the logits

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses and the number of targets; ConfigError if unknown."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                "train.loss=model expects samples that are dictionaries by the names of the "
                f"model's parameters, with labels, got a {type(batch).__name__}"
            )
        given = {"labels" if name == "label" else name: value for name, value in batch.items()}
        found = model(**given)
        loss, labels = getattr(found, "loss", None), given.get("labels")
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise ConfigError(
                "train.loss=model expects the model to return an object whose .loss is one number, "
                f"got a {type(found).__name__}; name a loss of (outputs, targets) instead"
            )
        if not self._is_seen and loss.isfinite():  # a mean over no target is NaN
            self.counts, self._is_seen = _seen(loss, found, labels, self.counts), True
        counts = self.counts or "labels"
        if counts == "rows" or not isinstance(labels, torch.Tensor):
            weight = torch.tensor(len(next(iter(given.values()))), device=loss.device)
        else:
            weight = are_valid(labels[:, 1:] if counts == "next" else labels).sum()
        return torch.where(weight > 0, loss * weight, 0), weight


def _seen(loss: torch.Tensor, found: Any, labels: Any, given: str) -> str:
    """Return what the loss is a mean over, by the logits or as given; ConfigError if unknown."""
    logits, fits = getattr(found, "logits", None), []
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor):
        pairs = {"labels": (logits, labels)}
        if labels.ndim > 1:
            pairs["next"] = logits[:, :-1], labels[:, 1:]
        for name, (scores, targets) in pairs.items():
            if scores.shape[:-1] == targets.shape and not targets.is_floating_point():
                mean = functional.cross_entropy(
                    scores.detach().flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED
                )
                fits += [name] * bool((mean - loss).abs() <= CLOSE * loss.abs())
    if given and (len(fits) != 1 or given in fits or (given == "rows" and labels.ndim == 1)):
        return given
    if not given and len(fits) == 1:
        return fits[0]
    if given:
        raise ConfigError(
            f"train.loss_args.counts={given}: the model's .loss is another mean of its cross "
            f"entropy; set counts={fits[0]}"
        )
    raise ConfigError(
        "train.loss=model: the model's .loss is not known to be a mean cross entropy over its "
        "labels, so it does not add up over ranks: set train.loss_args.counts to what it is a mean "
        "of (labels, next or rows), or name a loss of (model, batch) of your own"
    )
