"""Losses. Each returns one value per sample, so that padding can have weight zero."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from rollcall.config import arguments
from rollcall.config.catalog import LOSSES
from rollcall.config.schema import Config, ConfigError
from rollcall.train.numerics.metrics import check_name

if TYPE_CHECKING:
    from rollcall.train.numerics.precision import Scaler

IGNORED = -100
"""A class number that marks a target which does not count, as torch's `ignore_index`."""
NOTHING = "rows are empty, all targets are -100, or the loss returns weights of 0"
"""Why no target counts."""
Function = TypeVar("Function", bound=Callable[..., Any])


def of_classes(function: Function) -> Function:
    """Declare a loss of class numbers, of which -100 does not count.

    It returns the sum over each sample's targets divided by their number, with 0 for the ignored.
    """
    function.__dict__["kind"] = "classes"
    return function


def of_values(function: Function) -> Function:
    """Declare a loss of numeric targets, for which the outputs are the predictions."""
    function.__dict__["kind"] = "values"
    return function


@of_classes
def per_sample_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each sample: (rows, …, classes) and (rows, …) to (rows,)."""
    if targets.ndim == 1:
        return functional.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none")
    losses = functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return _mean(losses.view(targets.shape))


@of_values
def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each sample: outputs and targets of one shape to (rows,)."""
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"train.loss=mse expects outputs and targets of one shape, got {tuple(outputs.shape)} "
            f"and {tuple(targets.shape)}; for classification use train.loss=cross_entropy"
        )
    return (outputs - targets).square().reshape(len(targets), -1).mean(1)


def are_valid(targets: torch.Tensor) -> torch.Tensor:
    """Return which targets count: all but class numbers of -100."""
    if targets.is_floating_point():
        return torch.ones_like(targets, dtype=torch.bool)
    return targets.long() != IGNORED  # 156 of eight bits would equal -100


def are_scores(outputs: Any, targets: Any) -> bool:
    """Whether outputs are scores (rows, …, classes) for targets that are class numbers (rows, …).

    A single output is no choice of a class, but a number, such as the logit of one of two.
    """
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return False
    is_class = outputs.is_floating_point() and not targets.is_floating_point()
    return is_class and outputs.shape[:-1] == targets.shape and outputs.shape[-1:] > (1,)


def valid_share(targets: torch.Tensor) -> torch.Tensor:
    """Return the share of each sample's targets that count: (rows,)."""
    return _mean(are_valid(targets).float())


def _mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row: (rows, …) to (rows,); 0 of empty rows."""
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    return rows.mean(1) if rows.shape[1] else rows.sum(1)


@of_classes
def next_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row, where the target of a token is the one after it.

    `targets` are the input tokens, or -100 where they do not count, as the models of Hugging Face
    expect their labels. `Loss` has shifted both.
    """
    return per_sample_loss(outputs, targets)


class Sums(NamedTuple):
    """The sums of the loss over some samples."""

    losses: torch.Tensor  # (rows,), or (1,) of all rows
    weights: torch.Tensor  # likewise; the loss of a step is the sum of losses / sum of weights
    counts: torch.Tensor  # likewise; zero for padding
    samples: torch.Tensor  # how many samples count
    figures: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}  # the user's sums and weights


class Loss:
    """The loss that `train.loss` names.

    The loss of a row must not depend on other rows, since a batch is cut and padded.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], by_target: bool = False, source: str = ""
    ) -> None:
        """Use the function of this name.

        Args:
            by_target: whether rows have unequal numbers of targets, because they are padded.
            source: the value of data.name, for messages.
        """
        self.name = name
        self.function = function
        self._source = source
        # Whether it returns weights too. They are known only after a forward pass.
        self.is_weighted = by_target or name == "next_token"
        self._is_by_target = self.is_weighted
        code = arguments.code_of(function)
        names = {*code.signature.parameters} if code else set()
        self.takes_model = {"model", "batch"} <= names  # it calls the model itself
        if self.takes_model:
            self.is_weighted = True
        elif code and (problem := arguments.cannot_take(code, 2)):
            raise ConfigError(
                f"train.loss={name}: expected a function of (outputs, targets) or of (model, "
                f"batch): {problem}"
            )

    @property
    def is_of_values(self) -> bool:
        """Whether the outputs are numbers to be predicted, not scores of classes."""
        return self._kind == "values"

    @property
    def is_own(self) -> bool:
        """Whether the loss is the user's, or the user's model's."""
        return self.takes_model or self.name not in LOSSES

    @property
    def shifts(self) -> bool:
        """Whether each target is predicted from those before it in its row."""
        return self.name == "next_token" or getattr(self.function, "counts", "") == "next"

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the weight of each row, such that sum / sum is their mean.

        Raises:
            ConfigError: a result does not have shape (rows,).
        """
        losses, weights = self.of_rows(outputs, targets)
        if weights is None:
            weights = valid_share(targets) if self._counts_targets else torch.ones_like(losses)
        return losses, weights

    def of_rows(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same; no weights unless the loss returns them."""
        if not self.is_own:
            self._check(outputs, targets)
        outputs, targets = self.aligned(outputs, targets)
        try:
            found = self.function(outputs, targets)
        except IndexError as error:
            raise error if self.is_own else self._out_of_range(outputs, targets) from error
        if self.is_own and any(getattr(one, "requires_grad", 0) for one in tree_leaves(outputs)):
            self._check_gradient(found)
        if self._is_by_target and self._kind == "classes":
            each = targets[:1].numel()
            return found * each, valid_share(targets) * each
        self.is_weighted = isinstance(found, tuple) and len(found) == 2
        is_tensor = isinstance(targets, torch.Tensor)
        rows = len(targets if is_tensor else tree_leaves((targets, outputs))[0])
        losses, weights = found if self.is_weighted else (found, None)
        for one, what in ((losses, "loss"), (weights, "weight"))[: 1 + self.is_weighted]:
            if not isinstance(one, torch.Tensor) or one.shape != (rows,):
                shape = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
                raise ConfigError(
                    f"train.loss={self.name}: expected one {what} per sample, a tensor of shape "
                    f"({rows},), got {shape}; do not take the mean over the batch"
                )
        return losses, weights

    def total(self, outputs: Any, targets: Any) -> torch.Tensor | None:
        """Return the sum over all rows; None if the loss of each is as quick."""
        if self.function is not per_sample_loss or self.is_weighted:
            return None
        self._check(outputs, targets)
        if targets.ndim > 1:
            return None
        try:
            return functional.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")
        except IndexError as error:
            raise self._out_of_range(outputs, targets) from error

    def aligned(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs and the targets that they predict: the next tokens, for `next_token`."""
        if self.name != "next_token":
            return outputs, targets
        return outputs[:, :-1], targets[:, 1:]

    def of_model(self, model: nn.Module, batch: Any) -> Sums:
        """Call the user's function of a model and a batch, without rows that do not count.

        Raises:
            ConfigError: it returns something else than sums and weights.
        """
        real = batch.weights > 0
        count = real.sum()
        rows = int(count)  # of a batch of padding, one row is computed, and does not count
        if rows < len(real):
            places = real.nonzero()[:, 0] if rows else torch.zeros_like(real[:1], dtype=torch.long)
            batch = batch.map(lambda tensor: tensor[places])
        found = self.function(model=model, batch=batch.inputs)
        counts = torch.ones((), device=real.device) * bool(rows)
        figures: Mapping[str, Any] = {}
        if isinstance(found, tuple) and len(found) == 3:
            *found, figures = found
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ConfigError(
                f"train.loss={self.name}: expected a pair, the sum of the losses and the sum of "
                f"their weights, and maybe a dictionary of further such pairs, got a "
                f"{type(found).__name__}"
            )
        losses, weights = (self._total(one, real.device) for one in found)
        for name, pair in figures.items():
            check_name(f"train.loss={self.name}", name)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(
                    f"train.loss={self.name}: expected a pair as {name}, its sum and the sum of "
                    f"its weights, got a {type(pair).__name__}"
                )
        self._check_gradient(found[0])
        sums = {
            name: tuple(self._total(one, real.device) * counts for one in pair)
            for name, pair in figures.items()
        }
        return Sums(losses, weights, counts.expand(1), count.double(), sums)  # type: ignore[arg-type]

    def _total(self, value: Any, device: torch.device) -> torch.Tensor:
        """Return a sum over samples, or a tensor (rows,) of sums, as a tensor (1,)."""
        if not isinstance(value, torch.Tensor | int | float):
            raise ConfigError(
                f"train.loss={self.name}: expected tensors or numbers as sums and weights, got a "
                f"{type(value).__name__}"
            )
        return torch.as_tensor(value, device=device).float().sum().reshape(1)

    def check_targets(self, targets: Any) -> None:
        """Raise ConfigError if a loss of rollcall's has no target to learn."""
        if not self.is_own and isinstance(targets, tuple) and not targets:
            self._check(None, targets)

    def _check(self, outputs: Any, targets: Any) -> None:
        """Raise ConfigError if outputs or targets do not suit a loss of rollcall's."""
        is_tensor = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        if not is_tensor:
            kinds = type(outputs).__name__, type(targets).__name__
            what = "the model returned a {} and the target is a {}".format(*kinds)
            if isinstance(targets, tuple) and not targets:
                what = "the samples have no target"
            raise ConfigError(
                f"train.loss={self.name} expects one tensor from the model and one target, but "
                f"{what} (data.name={self._source}); name a loss of your own, or set data.target"
            )
        if self._kind != "classes":
            if self._is_by_target and math.prod(targets.shape[1:]) > 1:
                raise ConfigError(
                    f"train.loss={self.name}: padding would count in targets of shape "
                    f"{tuple(targets.shape)} (data.pad, data.name={self._source}); use a loss of "
                    "(model, batch) of your own"
                )
            return
        if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
            raise ConfigError(
                f"train.loss={self.name} expects outputs (rows, …, classes) and class numbers "
                f"(rows, …), got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}, {targets.dtype} (data.name={self._source}); for numeric "
                "targets use train.loss=mse"
            )

    def _check_gradient(self, found: Any) -> None:
        """Raise ConfigError if a loss of the user's has no gradient."""
        losses = found[0] if isinstance(found, tuple) else found
        is_tensor = isinstance(losses, torch.Tensor) and torch.is_grad_enabled()
        if self.is_own and is_tensor and not losses.requires_grad:
            raise ConfigError(
                f"train.loss={self.name}: the loss does not depend on the model's weights; compute "
                "it from what the model returns, without detach(), argmax or no_grad"
            )

    def _out_of_range(self, outputs: torch.Tensor, targets: torch.Tensor) -> ConfigError:
        counted, classes = targets[targets != IGNORED], outputs.shape[-1]
        wrong = counted[(counted < 0) | (counted >= classes)][0]
        return ConfigError(
            f"train.loss={self.name}: a target is {wrong}, but the model has {classes} outputs, "
            f"for the classes 0 to {classes - 1} (data.name={self._source}); change the targets, "
            "or give the model more classes"
        )

    def missing(self, targets: Any, weights: torch.Tensor, samples: int) -> float:
        """Return how many targets of a rank's samples do not count: a whole number.

        They are ignored, or of samples that could not be read. Rows of weight zero are padding or
        such samples. A GPU is waited for.
        """
        if not self._counts_targets:
            return samples - float(weights.sum(dtype=torch.float64))
        is_integer = not (targets.is_floating_point() or targets.is_cuda)
        is_full = is_integer and len(targets) == samples and (weights.numpy() == 1).all()
        if is_full and not (targets.numpy() == IGNORED).any():  # takes a tenth of what follows
            return 0.0
        size = self.size(targets)
        counted = (valid_share(targets) * size).round() * weights
        return samples * size - float(counted.sum(dtype=torch.float64))

    def size(self, targets: Any) -> int:
        """Return the number of targets of a sample, each of which counts once."""
        return max(1, math.prod(targets.shape[1:])) if self._counts_targets else 1

    @property
    def _counts_targets(self) -> bool:
        return self._kind == "classes" and not self.is_weighted

    @property
    def _kind(self) -> str:
        return getattr(self.function, "kind", "")


def build(
    name: str, args: Mapping[str, Any] | None = None, by_target: bool = False, source: str = ""
) -> Loss:
    """Return the loss that `train.loss` names; raise ConfigError if it is unknown."""
    function = arguments.call("train.loss", "train.loss_args", name, args or {})
    return Loss(name, function, by_target, source)


def of(config: Config) -> Loss:
    """Return the loss of a run."""
    train, data = config.train, config.data
    return build(train.loss, train.loss_args, bool(data.pad or data.pack), data.name)


class Objective:
    """The loss of a training step; all ranks notice if one rank's loss is not finite.

    Such a loss makes the gradient NaN. Ranks exchange gradients anyway, so the norm is NaN on all
    of them, whatever the strategy.
    """

    def __init__(self, loss: Loss, scaler: "Scaler | None" = None) -> None:
        self.loss = loss
        self.scaler = scaler  # of the gradient, for fp16
        self.seen: list[torch.Tensor] | None = None  # a list collects the losses of every call
        # For a loss that returns weights: their sum and the sum of samples in each call.
        self.weights: list[torch.Tensor] = []

    def __call__(
        self, outputs: Any, targets: Any, counts: torch.Tensor, guard: bool = True
    ) -> torch.Tensor:
        """Return the sum of the losses. Its gradient is scaled, its value is not.

        `counts` is zero for rows that do not count. Without `guard`, the backward pass must begin
        with `slope`, which is quicker.
        """
        is_plain = not guard and self.seen is None and _are_ones(counts)
        if is_plain and (total := self.loss.total(outputs, targets)) is not None:
            return total
        losses, weights = self.loss.of_rows(outputs, targets)
        samples = counts.sum() if self.loss.is_weighted else counts
        weights = losses if weights is None else weights
        return self._sum(Sums(losses, weights, counts, samples), len(counts), guard)

    def of_model(self, model: nn.Module, batch: Any, guard: bool = True) -> torch.Tensor:
        """Return the same of a loss that calls the model itself."""
        return self._sum(self.loss.of_model(model, batch), len(batch.weights), guard)

    def slope(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the gradient of a total with which its backward pass begins, on the device."""
        if total.is_cpu and self.scaler is None:
            if not math.isfinite(total.item()):
                scale = math.nan
            return torch.tensor(scale, dtype=total.dtype)
        by = scale * self.scaler.scale if self.scaler else scale
        return by + 0 * total.detach()

    def _sum(self, sums: Sums, rows: int, guard: bool) -> torch.Tensor:
        losses, weights, counts, samples, _ = sums
        if self.loss.is_weighted:
            weight = (weights.detach() * counts).sum(dtype=torch.float64)
            self.weights.append(torch.stack([weight, samples.to(weight)]))
        if self.seen is not None:
            self.seen.append(losses.detach().expand(rows))
        # To multiply by ones changes no bit.
        total = losses.sum() if _are_ones(counts) else (losses * counts).sum()
        if not guard:
            return total
        scale = self.scaler.scale if self.scaler else torch.ones((), device=losses.device)
        guarded: torch.Tensor = _Guarded.apply(total, scale)
        return guarded

    def sums_of_weights(self, device: torch.device) -> torch.Tensor:
        """Return the sums of weights and of samples over this rank's calls of a step: (2,)."""
        return sum(self.weights, torch.zeros(2, dtype=torch.float64, device=device))


def _are_ones(counts: torch.Tensor) -> bool:
    return counts.is_cpu and bool((counts.numpy() == 1).all())


class _Guarded(torch.autograd.Function):
    """The identity; its gradient is scaled, and NaN if the sum of losses is not finite."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(total, scale)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total, scale = ctx.saved_tensors
        return gradients[0] * (scale + 0 * total), None
