"""What is trained: one file per family, or `package.module:attribute` of the user's own."""

from __future__ import annotations

from torch import nn

from train.data.source import Source
from train.models.cnn import cnn
from train.models.gpt import gpt
from train.models.mlp import mlp
from train.plugin import load_attribute
from train.schema import ConfigError, Model

FAMILIES = {"cnn": cnn, "gpt": gpt, "mlp": mlp}


def build(config: Model, source: Source) -> nn.Module:
    """The model that the configuration names, for the shape and classes of the data.

    A user's own attribute is called with (config, source) as the families here are.

    Raises:
        ConfigError: there is no such model.
    """
    family = FAMILIES.get(config.name) or load_attribute(config.name, "model.name", FAMILIES)
    model = family(config, source)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name: {config.name} returned {type(model).__name__}, not a Module"
        )
    return model
