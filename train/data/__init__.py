"""What the model learns from, and in which order."""

from __future__ import annotations

from train.data.digits import digits
from train.data.mnist import mnist
from train.data.source import Source
from train.data.text import text
from train.plugin import load_attribute
from train.schema import ConfigError, Data
from train.world import World

SOURCES = {"digits": digits, "mnist": mnist, "text": text}


def load(config: Data, world: World) -> Source:
    """The data that the configuration names; every rank must call it together.

    A user's own attribute is called with (config, world) as the sources here are.

    Raises:
        ConfigError: there is no such data, or its files cannot be had.
    """
    make = SOURCES.get(config.name) or load_attribute(config.name, "data.name", SOURCES)
    source = make(config, world)
    if not isinstance(source, Source):
        raise ConfigError(
            f"data.name: {config.name} returned {type(source).__name__}, not a Source"
        )
    return source
