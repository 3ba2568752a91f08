"""Single layers divided over ranks: columns of one, rows of the next, one sum between the pairs.

Megatron-LM, https://arxiv.org/abs/1909.08053. The plans stand here, so that the models' files stay
plain; a model of the user's own brings one as `tensor_plan`. What a plan does not name is computed
alike on every rank of the dimension, from the same samples; so dropout may stand only between
columns and rows, where a rank draws for its own units.

With sequence parallelism, https://arxiv.org/abs/2205.05198, each rank computes what lies between
the pairs, such as norms, for its own piece of every sequence, and the sum becomes two halves: it
is scattered after rows and gathered before columns.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from train.config import Config
from train.data.source import Batch
from train.parallel.part import Part, nearest_multiples
from train.schema import ConfigError

COLUMNS, ROWS = "columns", "rows"
PIECE = Shard(1)
"""Of each sequence: (rows, length, hidden)."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}
SEQUENCE_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    COLUMNS: ColwiseParallel,
    ROWS: lambda: RowwiseParallel(output_layouts=PIECE),
    # The inputs of these columns come in pieces, not from a module whose input was gathered.
    "columns of pieces": lambda: ColwiseParallel(input_layouts=PIECE),
    "of pieces": lambda: SequenceParallel(use_local_output=True),
    "scatter": lambda: PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=PIECE
    ),
    "gather": lambda: PrepareModuleInput(
        input_layouts=PIECE, desired_input_layouts=Replicate(), use_local_output=True
    ),
    # One gather for several columns, whose gradients are added before they are scattered.
    "gather for columns": lambda: PrepareModuleInput(
        input_layouts=PIECE, desired_input_layouts=Replicate()
    ),
}


class Plan(NamedTuple):
    """How a model is cut.

    Attributes:
        layers: names, with * for any, and the cut of each.
        divided: keys of `model` that must divide by the degree.
        sequence: changes of the layers for sequence parallelism, if they can be.
    """

    layers: Mapping[str, str]
    divided: tuple[str, ...] = ("hidden",)
    sequence: Mapping[str, str] = {}


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
        sequence={
            "embedding": "scatter",
            "block*.attention_norm": "of pieces",
            "block*.attention": "gather for columns",
            "block*.perceptron_norm": "of pieces",
            "block*.up": "columns of pieces",
            "norm": "of pieces",
            "head": "gather",
        },
    ),
}


class Tensor(Part):
    """The layers of the model's plan, cut over the ranks of one dimension."""

    def __init__(self, mesh: DeviceMesh, config: Config, pieces: int) -> None:
        """Take the degree.

        Args:
            pieces: of each sequence that other ranks compute.
        """
        self._mesh = mesh
        self._model = config.model
        self._sequence = config.parallel.sequence
        self._pieces = pieces
        self._plan = Plan({})

    def check(self, model: nn.Module, example: Batch) -> None:
        """Take the plan; widths, heads and sequences must divide."""
        name, degree = self._model.name, self._mesh.size()
        own: Any = getattr(model, "tensor_plan", None)
        if own is not None:
            sequence: Any = getattr(model, "sequence_plan", {})
            self._plan = Plan(own, (), sequence)
        elif name in PLANS:
            self._plan = PLANS[name]
        else:
            raise ConfigError(
                f"tensor parallelism has no plan for model.name={name}: give the model one as its "
                f"attribute tensor_plan, or choose one of {', '.join(PLANS)}"
            )
        for key in self._plan.divided:
            if (number := getattr(self._model, key)) % degree:
                raise ConfigError(
                    f"model.{key}={number} does not divide by tensor={degree}; "
                    f"choose model.{key}={nearest_multiples(number, degree)}"
                )
        self._check_layers(model, degree)
        if self._sequence:
            self._check_sequence(example, degree)

    def _check_layers(self, model: nn.Module, degree: int) -> None:
        matches = _matches(model, self._plan.layers)
        for pattern, cut in self._plan.layers.items():
            problem = "" if cut in STYLES else f"a layer is cut into {' or '.join(STYLES)}"
            if not any(fnmatch.fnmatch(name, pattern) for name, *_ in matches):
                problem = "the model has no such layer"
            if problem:
                raise ConfigError(f"tensor_plan says {pattern}: {cut}, but {problem}")
        for name, cut, layer in matches:
            if not isinstance(layer, nn.Linear):
                raise ConfigError(
                    f"tensor_plan names {name}, which is a {type(layer).__name__}: only nn.Linear "
                    "can be cut"
                )
            width = layer.out_features if cut == COLUMNS else layer.in_features
            if width % degree:
                raise ConfigError(
                    f"layer {name} has {width} {cut}, which do not divide by tensor={degree}; "
                    f"give it {nearest_multiples(width, degree)}"
                )

    def _check_sequence(self, example: Batch, degree: int) -> None:
        if not self._plan.sequence:
            raise ConfigError(
                f"parallel.sequence=true has no plan for model.name={self._model.name}: choose "
                "model.name=gpt, give the model one as its attribute sequence_plan, or leave it out"
            )
        length = example.inputs.shape[1]
        if length % (degree * self._pieces):
            by = f"tensor={degree}" + f" times context={self._pieces}" * (self._pieces > 1)
            raise ConfigError(
                f"sequences of {length} do not divide by {by} for parallel.sequence=true; choose "
                f"data.context={nearest_multiples(length, degree * self._pieces)}"
            )

    def apply(self, model: nn.Module) -> None:
        """Cut the layers in place."""
        # A cut layer returns a view, and FSDP2 around it warns of writes in place (torch 2.15);
        # the models that have a plan write nothing there.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        plan, styles = self._plan.layers, STYLES
        if self._sequence:
            plan, styles = {**plan, **self._plan.sequence}, SEQUENCE_STYLES
        found = {name: styles[cut]() for name, cut, _ in _matches(model, plan)}
        parallelize_module(model, self._mesh, found)

    def finish(self, model: nn.Module) -> None:
        """Add what each rank knows of the gradient of a norm: that of its pieces of sequences."""
        for parameter in model.parameters():
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    def describe(self, model: nn.Module) -> str:
        """The sums of activations."""
        cuts = _matches(model, self._plan.layers)
        if not cuts:
            return ""
        forward = sum(layer.out_features for _, cut, layer in cuts if cut == ROWS)
        backward = sum(layer.in_features for _, cut, layer in cuts if cut == COLUMNS)
        names = ", ".join(pattern for pattern in self._plan.layers)
        how = "in halves, scattered after rows and gathered before columns, " * self._sequence
        return (
            f"Each rank holds 1/{self._mesh.size()} of layers {names}; per micro-batch all-reduces "
            f"{how}of {forward} numbers a sample or token in the forward and at most {backward} in "
            "the backward."
        )


def _matches(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """The layers that a plan names, but for those that other stages of a pipeline hold."""
    return [
        (name, cut, layer)
        for name, layer in model.named_modules()
        for pattern, cut in plan.items()
        if fnmatch.fnmatch(name, pattern) and not isinstance(layer, nn.Identity)
    ]
