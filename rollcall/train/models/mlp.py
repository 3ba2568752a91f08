"""A multilayer perceptron with one hidden layer."""

from math import prod
from typing import ClassVar

from torch import nn

from rollcall.config.schema import Model
from rollcall.train.data.source import Source


class Mlp(nn.Sequential):
    """Two linear layers."""

    tensor_plan: ClassVar = {"1": "columns", "4": "rows"}
    tensor_divides = ("hidden_size",)


def mlp(config: Model, source: Source) -> nn.Module:
    """Return a model for inputs of any shape: (rows, *shape) to (rows, classes) logits."""
    return Mlp(
        nn.Flatten(),
        nn.Linear(prod(source.shape), config.hidden_size),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden_size, source.classes),
    )
