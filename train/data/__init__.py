"""What the model learns from, and in which order."""

from __future__ import annotations

from dataclasses import replace

from train.data.digits import digits
from train.data.folder import folder
from train.data.readers import reader
from train.data.source import Source
from train.data.synthetic import synthetic_images, synthetic_tokens
from train.data.text import text
from train.data.tokens import tokens
from train.data.vision import cifar10, cifar100, fashionmnist, mnist
from train.plugin import load_attribute
from train.schema import ConfigError, Data
from train.world import World

SOURCES = {
    "digits": digits,
    "mnist": mnist,
    "fashionmnist": fashionmnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "folder": folder,
    "text": text,
    "tokens": tokens,
    "synthetic_images": synthetic_images,
    "synthetic_tokens": synthetic_tokens,
}
AUGMENTED = ("cifar10", "cifar100", "folder")


def load(config: Data, world: World) -> Source:
    """The data that the configuration names; every rank must call it together.

    A user's own attribute is called with (config, world) as the sources here are.

    Raises:
        ConfigError: there is no such data, or its files cannot be had.
    """
    make = SOURCES.get(config.name) or load_attribute(config.name, "data.name", SOURCES)
    if config.augment and config.name in SOURCES and config.name not in AUGMENTED:
        raise ConfigError(
            f"data.augment=true is for {', '.join(AUGMENTED)}; data.name={config.name} has nothing "
            "to shift or mirror: leave it out"
        )
    source = make(config, world)
    if not isinstance(source, Source):
        raise ConfigError(
            f"data.name: {config.name} returned {type(source).__name__}, not a Source"
        )
    return replace(source, read=source.read or reader(config, source.classes))
