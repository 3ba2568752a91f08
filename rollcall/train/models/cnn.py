"""A small convolutional network without BatchNorm: its results do not depend on the world size."""

from typing import ClassVar

from torch import nn

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data.source import Source


class Cnn(nn.Sequential):
    """Two convolutions and two linear layers."""

    tensor_plan: ClassVar = {"6": "columns", "9": "rows"}
    tensor_divides = ("hidden_size",)


def cnn(config: Model, source: Source) -> nn.Module:
    """Return a model for images: (rows, channels, height, width) to (rows, classes) logits."""
    if len(source.shape) != 3:
        raise ConfigError(
            f"model.name=cnn expects images (channels, height, width), got samples of shape "
            f"{source.shape}; choose model.name=mlp"
        )
    channels, height, width = source.shape
    return Cnn(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), config.hidden_size),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden_size, source.classes),
    )
