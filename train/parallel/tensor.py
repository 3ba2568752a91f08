"""Single layers divided over ranks: columns of one, rows of the next, one sum between the pairs.

Megatron-LM, https://arxiv.org/abs/1909.08053. The plans stand here, so that the models' files stay
plain. What a plan does not name is computed alike on every rank of the dimension, from the same
samples; so dropout may stand only between columns and rows, where a rank draws for its own units.
"""

from __future__ import annotations

import fnmatch
import warnings
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from train.parallel.part import Part
from train.schema import ConfigError, Model

COLUMNS, ROWS = "columns", "rows"
STYLES: dict[str, type[ParallelStyle]] = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}


class Plan(NamedTuple):
    """How a model is cut.

    Attributes:
        layers: names, with * for any, and the cut of each.
        divided: keys of `model` that must divide by the degree.
    """

    layers: dict[str, str]
    divided: tuple[str, ...] = ("hidden",)


PLANS = {
    "cnn": Plan({"6": COLUMNS, "9": ROWS}),
    "mlp": Plan({"1": COLUMNS, "4": ROWS}),
    "gpt": Plan(
        {
            "block*.attention.query": COLUMNS,
            "block*.attention.key": COLUMNS,
            "block*.attention.value": COLUMNS,
            "block*.attention.out": ROWS,
            "block*.up": COLUMNS,
            "block*.down": ROWS,
        },
        divided=("hidden", "heads", "kv_heads"),
    ),
}


class Tensor(Part):
    """The layers of the model's plan, cut over the ranks of one dimension."""

    def __init__(self, mesh: DeviceMesh, model: Model) -> None:
        """Take the plan of the model.

        Raises:
            ConfigError: it has none, or its width does not divide by the degree.
        """
        self._mesh = mesh
        if model.name not in PLANS:
            raise ConfigError(
                f"tensor parallelism has no plan for model.name={model.name}; "
                f"the models with one are {', '.join(PLANS)}"
            )
        self._plan = PLANS[model.name]
        for key in self._plan.divided:
            number, degree = getattr(model, key), mesh.size()
            below = number // degree * degree
            if below != number:
                nearest = " or ".join(str(other) for other in (below, below + degree) if other)
                raise ConfigError(
                    f"model.{key}={number} does not divide by tensor={degree}; "
                    f"choose model.{key}={nearest}"
                )

    def apply(self, model: nn.Module) -> nn.Module:
        """Cut the layers in place."""
        # A cut layer returns a view, and FSDP2 around it warns of writes in place (torch 2.15);
        # the models that have a plan write nothing there.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        names = [name for name, _ in model.named_modules()]
        styles = {
            pattern: STYLES[cut]()
            for pattern, cut in self._plan.layers.items()
            if fnmatch.filter(names, pattern)  # other stages of a pipeline hold the others
        }
        return parallelize_module(model, self._mesh, styles)

    def describe(self, model: nn.Module) -> str:
        """The sums of activations."""
        cuts: list[tuple[str, str, Any]] = [
            (pattern, cut, layer)
            for name, layer in model.named_modules()
            for pattern, cut in self._plan.layers.items()
            if fnmatch.fnmatch(name, pattern)
        ]
        if not cuts:
            return ""
        forward = sum(layer.out_features for _, cut, layer in cuts if cut == ROWS)
        backward = sum(layer.in_features for _, cut, layer in cuts if cut == COLUMNS)
        names = ", ".join(dict.fromkeys(pattern for pattern, _, _ in cuts))
        return (
            f"Each rank holds 1/{self._mesh.size()} of layers {names}; per "
            f"micro-batch all-reduces of {forward} numbers a sample or token in the forward and at "
            f"most {backward} in the backward."
        )
