"""Metrics of the user's: sums over samples, which add up over batches and ranks."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollcall.config import arguments
from rollcall.config.schema import ConfigError, Train
from rollcall.train.torch_private import tree_leaves

CONTRACT = (
    "expected one value for each sample, a tensor (rows,); a pair of sums and weights (rows,); or "
    "with a method result(totals), counts (rows, n)"
)

TAKEN = "loss", "perplexity", "step", "time", "event", "seconds"
"""Names of other figures and fields."""


class Metric:
    """One metric that `train.metrics` names.

    It is a function of `outputs` and `targets`, or an object that is called with them. Its values
    are averaged over all samples, or divided by the sum of its weights. If it has a method
    `result`, this makes the metric of the sums: a number, or numbers by name.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name, self.function = name, function
        self._result: Callable[..., Any] | None = getattr(function, "result", None)

    def terms(self, outputs: Any, targets: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums and weights: (rows,), or (rows, n) and (rows,); or raise ConfigError."""
        found = self.function(outputs, targets)
        device = tree_leaves(outputs)[0].device
        pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        sums = pair[0]
        weights = torch.ones(rows, device=device) if pair[1] is None else pair[1]
        for one in (sums, weights):
            most = 2 if self._result and one is sums else 1
            is_tensor = isinstance(one, torch.Tensor)
            if not is_tensor or one.ndim not in (1, most) or len(one) != rows:
                got = tuple(one.shape) if is_tensor else type(one).__name__
                raise ConfigError(
                    f"train.metrics.{self._name}: {CONTRACT}; got {got} for {rows} samples"
                )
        return sums, weights

    def figures(self, name: str, sums: list[float], weight: float) -> dict[str, float]:
        """Return the metric of the sums over all samples."""
        if self._result is None:
            return {name: sums[0] / weight if weight else 0.0}
        totals = torch.tensor(sums, dtype=torch.float64)
        found = self._result(totals if len(sums) > 1 else totals[0])
        if isinstance(found, Mapping):
            return {f"{name}_{key}": float(value) for key, value in found.items()}
        try:
            return {name: float(found)}
        except (TypeError, ValueError):
            raise ConfigError(
                f"train.metrics.{name}: result() expects to return a number, or numbers by name, "
                f"got a {type(found).__name__}"
            ) from None


def build(config: Train, has_outputs: bool = True) -> dict[str, Metric]:
    """Return the metrics that the configuration names.

    Raise ConfigError if one is not callable, or has the name of a figure of rollcall's; or if the
    loss calls the model itself, so that the evaluation has no outputs.
    """
    found = {}
    if config.metrics and not has_outputs:
        raise ConfigError(
            f"train.metrics: train.loss={config.loss} calls the model itself, so metrics would get "
            "no outputs: let a loss of (model, batch) return their sums and weights as figures"
        )
    for name, entry in config.metrics.items():
        check_name(f"train.metrics.{name}", name)
        made = arguments.call("train.metrics", f"train.metrics.{name}.args", entry.name, entry.args)
        code = arguments.code_of(made) if callable(made) and not inspect.isclass(made) else None
        if problem := (arguments.cannot_take(code, 2) if code else f"got a {type(made).__name__}"):
            raise ConfigError(
                f"train.metrics.{name}={entry.name}: expected a function of (outputs, targets), "
                f"{problem}"
            )
        found[name] = Metric(name, made)
    return found


def check_name(where: str, name: str) -> None:
    """Raise ConfigError if a figure of the user's would replace one that rollcall reports."""
    if name in TAKEN:
        raise ConfigError(f"{where}: the name {name} is taken; use another, such as my_{name}")
