"""The tutorials' perceptron: one hidden layer."""

from math import prod

from torch import nn

from train.data.source import Source
from train.schema import Model


def mlp(config: Model, source: Source) -> nn.Module:
    """Two layers, `hidden` units between them: (batch, *shape) to (batch, classes) logits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(source.shape), config.hidden),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden, source.classes),
    )
