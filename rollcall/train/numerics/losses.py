"""Losses. Each returns one value per sample, so that padding can have weight zero."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollcall.config import arguments
from rollcall.config.catalog import LOSSES
from rollcall.config.schema import Config, ConfigError
from rollcall.train.numerics import cross_entropy
from rollcall.train.numerics.cross_entropy import IGNORED
from rollcall.train.numerics.metrics import check_name
from rollcall.train.torch_private import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from rollcall.train.numerics.precision import Scaler

NOTHING = "rows are empty, all targets are -100, or the loss returns weights of 0"
"""Why no target counts."""
KINDS = {"cross_entropy": "classes", "next_token": "classes", "mse": "values"}
"""The targets of rollcall's losses: class numbers, of which -100 does not count, or numbers."""


def per_sample_loss(
    outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """Return the cross entropy of each sample in fp32: (rows, …, classes), (rows, …) to (rows,).

    Training spreads `label_smoothing` of a target over all classes, and adds z_loss * logsumexp².
    """
    if not torch.is_grad_enabled():
        label_smoothing = z_loss = 0.0
    scores, classes = outputs.flatten(0, -2) if targets.ndim > 1 else outputs, targets.flatten()

    def of_part(part: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        options: Any = {"reduction": "none", "label_smoothing": label_smoothing}
        found = functional.cross_entropy(values := part.float(), local, **options)
        of_z = z_loss and z_loss * values.logsumexp(-1).square() * are_valid(local)
        return found + of_z if z_loss else found

    size = max(1, cross_entropy.CHUNK // max(1, scores.shape[-1]))
    if len(scores) <= size:
        losses = of_part(scores, classes)
    else:  # only the scores are kept, and copies of some are made again for the gradient
        pairs = zip(torch.split(scores, size), torch.split(classes, size), strict=True)
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        losses = torch.cat([checkpoint(of_part, *pair, **options) for pair in pairs])
    return losses if targets.ndim == 1 else _mean(losses.view(targets.shape))


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each sample: outputs and targets of one shape to (rows,)."""
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"train.loss=mse expects outputs and targets of one shape, got {tuple(outputs.shape)} "
            f"and {tuple(targets.shape)}; for classification use train.loss=cross_entropy"
        )
    return (outputs - targets).square().reshape(len(targets), -1).mean(1)


def outputs_of(model: nn.Module, batch: Any) -> Any:
    """Return the model's outputs for a batch: the `logits` of a model of Hugging Face."""
    positional, named = arguments_of(batch.inputs)
    outputs = model(*positional, **named)
    return getattr(outputs, "logits", outputs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as positional and named arguments of the model."""
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def in_fp32(outputs: Any) -> Any:
    """Return outputs with 16-bit floats as fp32, in which losses are computed."""
    if isinstance(outputs, torch.Tensor):  # a tree's functions take ten times as long
        return outputs.float() if outputs.is_floating_point() else outputs
    return tree_map_only(torch.Tensor, in_fp32, outputs)


def are_valid(targets: torch.Tensor) -> torch.Tensor:
    """Return which targets count: all but class numbers of -100."""
    if targets.is_floating_point():
        return torch.ones_like(targets, dtype=torch.bool)
    return targets.long() != IGNORED  # 156 of eight bits would equal -100


def are_scores(outputs: Any, targets: Any) -> bool:
    """Return True if outputs are scores (rows, …, several classes) for classes (rows, …)."""
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


class Sums(NamedTuple):
    """The sums of the loss over some samples."""

    losses: torch.Tensor  # (rows,), or (1,) of all rows
    weights: torch.Tensor  # likewise; the loss of a step is the sum of losses / sum of weights
    counts: torch.Tensor  # likewise; zero for padding
    samples: torch.Tensor  # how many samples count
    figures: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}  # the user's sums and weights


class Scored(NamedTuple):
    """Losses that a model's last layer computes in place of scores; see `parallel/head.py`."""

    losses: torch.Tensor  # of each target, 0 if it does not count, in the shape of the targets
    total: torch.Tensor  # their sum as `Objective` adds them up; it has the gradient


class Loss:
    """The loss that `train.loss` names; its value for a row must not depend on other rows."""

    def __init__(
        self, name: str, function: Callable[..., Any], by_target: bool = False, source: str = ""
    ) -> None:
        """Wrap a function; `by_target`: rows are padded. `source` is data.name, for messages."""
        self.name, self.function = name, function
        # The loss, if it is a module with tensors, such as the centers of classes.
        module = function if isinstance(function, nn.Module) else None
        self.module = module if module and module.state_dict() else None
        self._source = source
        self.is_of_transformers = False  # it is the loss of a model of transformers, which shifts
        self._kind = KINDS.get(name, "")
        self.is_of_values = self._kind == "values"  # outputs are numbers, not scores of classes
        self._is_by_target = by_target or name == "next_token"
        # Whether it returns weights too. They are known only after a forward pass.
        self.is_weighted = self._is_by_target and self._kind == "classes"
        code = arguments.code_of(function)
        names = {*code.signature.parameters} if code else set()
        self.takes_model = {"model", "batch"} <= names  # it calls the model itself
        self.is_own = self.takes_model or name not in LOSSES  # the user's, or the user's model's
        self.converts = self._kind == "classes" and not self.is_own  # the outputs to fp32
        # The networks that it trains in turn, one in each step, and the newest step's.
        self.turns = tuple(getattr(function, "turns", ())) if self.takes_model else ()
        self.turn = ""
        if self.takes_model:
            self.is_weighted = True
            if bool(self.turns) != ("turn" in names):
                raise ConfigError(
                    f"train.loss={name}: a loss that trains networks in turn expects a parameter "
                    "turn and an attribute turns, such as ('critic', 'generator'); it has only one"
                )
        elif code and (problem := arguments.cannot_take(code, 2)):
            raise ConfigError(
                f"train.loss={name}: expected a function of (outputs, targets) or of (model, "
                f"batch): {problem}"
            )

    @property
    def shifts(self) -> bool:
        """True if each target is predicted from those before it in its row."""
        return self.name == "next_token" or getattr(self.function, "counts", "") == "next"

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and weight of each row: (rows,); ConfigError for another shape."""
        losses, weights = self.of_rows(outputs, targets)
        if weights is None:
            weights = valid_share(targets) if self._counts_targets else torch.ones_like(losses)
        return losses, weights

    def of_rows(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same; no weights unless the loss returns them."""
        is_scored = isinstance(outputs, Scored) or are_scores(outputs, targets)
        if not self.is_own and not (self._kind == "classes" and is_scored):
            self._check(outputs, targets)
        if self.name == "next_token":
            outputs, targets = self.aligned(outputs, targets)
        if isinstance(outputs, Scored):
            losses = outputs.losses.view(len(targets), -1).sum(1) / max(1, targets[:1].numel())
        else:
            try:
                losses = self.function(outputs, targets)
            except IndexError as error:
                raise error if self.is_own else self._out_of_range(targets, outputs) from error
        if self._is_by_target and self._kind == "classes":
            size = targets[:1].numel()
            return losses * size, valid_share(targets) * size
        if self.is_own:
            self._check_own(losses, outputs, targets)
            self.is_weighted = isinstance(losses, tuple)  # known from the first call on
        return losses if self.is_weighted else (losses, None)

    def _check_own(self, found: Any, outputs: Any, targets: Any) -> None:
        if any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(outputs)):
            self._check_gradient(found)
        first = targets if isinstance(targets, torch.Tensor) else tree_leaves((targets, outputs))[0]
        is_pair = isinstance(found, tuple) and len(found) == 2
        for what, values in zip(("loss", "weight"), found if is_pair else [found], strict=False):
            is_tensor = isinstance(values, torch.Tensor)
            if not is_tensor or values.shape != (len(first),):
                shape = tuple(values.shape) if is_tensor else type(values).__name__
                raise ConfigError(
                    f"train.loss={self.name}: expected one {what} per sample, a tensor of shape "
                    f"({len(first)},), got {shape}; do not take the mean over the batch"
                )

    def aligned(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs and the targets that they predict: the next tokens, for `next_token`."""
        if self.name != "next_token":
            return outputs, targets
        return outputs if isinstance(outputs, Scored) else outputs[:, :-1], targets[:, 1:]

    def of_layer(self, x: torch.Tensor, layer: nn.Linear, batch: Any) -> tuple[Scored, Any]:
        """Return the losses of a last layer, and which targets have the largest score."""
        targets, shape = batch.targets.long(), batch.targets.shape
        size = targets[:1].numel()
        if self.name == "next_token":
            targets, size = functional.pad(targets[:, 1:], (0, 1), value=IGNORED), size - 1
        weights = batch.weights if self.is_weighted else batch.weights / size
        factors = getattr(self.function, "keywords", {}) if torch.is_grad_enabled() else {}
        given = factors.get("label_smoothing", 0.0), factors.get("z_loss", 0.0)
        targets, weights = targets.flatten(), weights.repeat_interleave(shape[1:].numel())
        try:
            total, figures = cross_entropy.of_layer(
                x.flatten(0, -2), layer, targets, weights, *given
            )
        except IndexError as error:
            raise self._out_of_range(targets, layer.weight.t()) from error
        losses, hits = figures.view(2, *shape)
        return Scored(losses, total), hits

    def turn_of(self, step: int) -> str:
        """Return the network that a step, counted from 1, trains; empty if it trains all."""
        return self.turns[(step - 1) % len(self.turns)] if self.turns else ""

    def of_model(self, model: nn.Module, batch: Any) -> Sums:
        """Call the user's function without padding; outside of steps, add up all turns."""
        if not self.turns:
            return self._of_model(model, batch)
        is_step = self.turn and torch.is_grad_enabled()
        turns = [self.turn] if is_step else dict.fromkeys(self.turns)
        parts = {turn: self._of_model(model, batch, turn=turn) for turn in turns}
        figures = {name: pair for part in parts.values() for name, pair in part.figures.items()}
        figures |= {
            f"loss_{turn}": (part.losses * part.counts, part.weights * part.counts)
            for turn, part in parts.items()
        }
        losses = torch.stack([part.losses for part in parts.values()]).sum(0)
        weights = torch.stack([part.weights for part in parts.values()]).mean(0)
        first = next(iter(parts.values()))
        return first._replace(losses=losses, weights=weights, figures=figures)

    def _of_model(self, model: nn.Module, batch: Any, **turn: str) -> Sums:
        """Call the function once; raise ConfigError unless it returns sums and weights."""
        real = batch.weights > 0
        count = real.sum()
        rows = int(count)  # of a batch of padding, one row is computed, and does not count
        if rows < len(real):
            places = real.nonzero()[:, 0] if rows else torch.zeros_like(real[:1], dtype=torch.long)
            batch = batch.map(lambda tensor: tensor[places])
        refusal = ConfigError(
            f"train.loss={self.name} computes with weights of the model, of which each rank has a "
            "shard: compute with them inside of the model's forward(), or choose ddp or zero1"
        )
        try:
            found = self.function(model=model, batch=batch.inputs, **turn)
        except RuntimeError as error:
            raise refusal if "DTensor" in str(error) else error from None
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(found)):
            raise refusal
        counts = torch.ones((), device=real.device) * bool(rows)
        figures: Mapping[str, Any] = {}
        if isinstance(found, tuple) and len(found) == 3:
            *found, figures = found
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ConfigError(
                f"train.loss={self.name}: expected a pair, the sum of the losses and the sum of "
                f"their weights, and optionally a dictionary of more such pairs, got a "
                f"{type(found).__name__}"
            )
        losses, weights = (self._total(one, real.device) for one in found)
        sums: dict[str, Any] = {}
        for name, pair in figures.items():
            check_name(f"train.loss={self.name}", name)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(
                    f"train.loss={self.name}: expected a pair as {name}, its sum and the sum of "
                    f"its weights, got a {type(pair).__name__}"
                )
            sums[name] = tuple(self._total(one, real.device) * counts for one in pair)
        self._check_gradient(found[0])
        return Sums(losses, weights, counts.expand(1), count.double(), sums)

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
        if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
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
        losses = found[0] if isinstance(found, tuple) else found
        is_tensor = isinstance(losses, torch.Tensor) and torch.is_grad_enabled()
        if self.is_own and is_tensor and not losses.requires_grad:
            raise ConfigError(
                f"train.loss={self.name}: the loss does not depend on the model's weights; compute "
                "it from what the model returns, without detach(), argmax or no_grad"
            )

    def _out_of_range(self, targets: torch.Tensor, outputs: torch.Tensor) -> ConfigError:
        counted, classes = targets[targets != IGNORED], outputs.shape[-1]
        wrong = counted[(counted < 0) | (counted >= classes)][0]
        return ConfigError(
            f"train.loss={self.name}: a target is {wrong}, but the model has {classes} outputs, "
            f"for the classes 0 to {classes - 1} (data.name={self._source}); change the targets, "
            "or give the model more classes"
        )

    def count(self, targets: Any, weights: torch.Tensor) -> torch.Tensor:
        """Return the number of samples that count, each by its share of valid targets: fp64."""
        if not self._counts_targets:
            return weights.sum(dtype=torch.float64)
        size: int = max(1, math.prod(targets.shape[1:]))
        counted = (valid_share(targets) * size).round() * weights  # whole numbers
        return counted.sum(dtype=torch.float64) / size

    def weight(self, targets: Any, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of a batch's weights before its passes: fp64; or raise ConfigError."""
        if not self.is_weighted:
            return self.count(targets, weights)
        if self.is_own:
            raise ConfigError(
                f"train.loss={self.name} returns weights after the losses of experts need them: "
                "remove balance_loss and z_loss, or let the loss return no weights"
            )
        targets = targets[:, 1:] if self.name == "next_token" else targets
        weighted: torch.Tensor = valid_share(targets) * targets[:1].numel() * weights
        return weighted.sum(dtype=torch.float64)

    @property
    def _counts_targets(self) -> bool:
        return self._kind == "classes" and not self.is_weighted


def build(
    name: str, args: Mapping[str, Any] | None = None, by_target: bool = False, source: str = ""
) -> Loss:
    """Return the loss that `train.loss` names; raise ConfigError if it is unknown."""
    function = arguments.call("train.loss", "train.loss_args", name, args or {})
    return Loss(name, function, by_target, source)


def of(config: Config) -> Loss:
    """Return the loss of a run."""
    train, data = config.train, config.data
    loss = build(train.loss, train.loss_args, bool(data.pad or data.pack), data.name)
    loss.is_of_transformers = loss.name == "model" and config.model.name == "transformers"
    return loss


class Objective:
    """The loss of a step; one that is not finite makes the gradient NaN, on all ranks."""

    def __init__(self, loss: Loss, scaler: "Scaler | None" = None) -> None:
        self.loss = loss
        self.scaler = scaler  # of the gradient, for fp16
        self.seen: list[torch.Tensor] | None = None  # a list collects the losses of every call
        # For a loss that returns weights: their sum and the sum of samples in each call.
        self.weights: list[torch.Tensor] = []

    def __call__(self, outputs: Any, targets: Any, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses; its gradient is scaled. `counts` is zero for padding."""
        losses, weights = self.loss.of_rows(outputs, targets)
        samples = counts if weights is None else counts.sum()
        total = outputs.total if isinstance(outputs, Scored) else (losses * counts).sum()
        weights = losses if weights is None else weights
        return self._sum(Sums(losses, weights, counts, samples), total)

    def of_model(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the same of a loss that calls the model itself."""
        sums = self.loss.of_model(model, batch)
        return self._sum(sums, (sums.losses * sums.counts).sum(), len(batch.weights))

    def _sum(self, sums: Sums, total: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        losses, weights, counts, samples, _ = sums
        if self.loss.is_weighted:
            weight = (weights.detach() * counts).sum(dtype=torch.float64)
            self.weights.append(torch.stack([weight, samples.to(weight)]))
        if self.seen is not None:
            self.seen.append(losses.detach().expand(rows or len(losses)))
        if total.requires_grad:
            scale, value = self.scaler.scale if self.scaler else 1, total.detach()
            # NaN if the sum of losses is not finite.
            total.register_hook(lambda gradient: gradient * (scale + 0 * value))  # type: ignore[no-untyped-call]
        return total

    def sums_of_weights(self, device: torch.device) -> torch.Tensor:
        """Return the sums of weights and of samples over this rank's calls of a step: (2,)."""
        return sum(self.weights, torch.zeros(2, dtype=torch.float64, device=device))
