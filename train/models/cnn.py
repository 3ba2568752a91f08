"""A small convolutional network, without BatchNorm: results do not depend on the world size."""

from torch import nn

from train.data.source import Source
from train.schema import ConfigError, Model


def cnn(config: Model, source: Source) -> nn.Module:
    """Two convolutions and two linear layers: (batch, channels, height, width) to class logits.

    Raises:
        ConfigError: the samples are not images.
    """
    if len(source.shape) != 3:
        raise ConfigError(
            f"model.name=cnn needs images (channels, height, width), but the samples of this data "
            f"have shape {source.shape}: choose model.name=mlp"
        )
    channels, height, width = source.shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), config.hidden),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden, source.classes),
    )
