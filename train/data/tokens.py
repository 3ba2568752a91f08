"""Token files: unsigned 16-bit numbers one after the other, as nanoGPT and others write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.source import Source
from train.data.windows import all_of
from train.schema import ConfigError, Data
from train.world import World

CHUNK = 2**24


def tokens(config: Data, world: World) -> Source:
    """Samples of `context` tokens from train.bin and val.bin, which are mapped, not read.

    Raises:
        ConfigError: the files are not there, or are no token files.
    """
    if config.path is None:
        raise ConfigError(
            "data.name=tokens needs data.path, a directory with train.bin and val.bin of unsigned "
            "16-bit tokens"
        )
    paths = [Path(config.path) / name for name in ("train.bin", "val.bin")]
    context, splits = config.context, [mapped(path) for path in paths]
    classes = config.classes or _count(splits, world)
    train, validation = (
        all_of(split, context, classes, str(path))
        for split, path in zip(splits, paths, strict=True)
    )
    return Source(train, validation, len(train), len(validation), (context,), classes)


def mapped(path: Path) -> NDArray[np.uint16]:
    """The tokens of a file, read when they are used.

    Raises:
        ConfigError: it cannot be read, or is no token file.
    """
    try:
        return np.memmap(path, np.dtype("<u2"), "r")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # it is empty, or has an odd number of bytes
        raise ConfigError(f"{path} is no file of 16-bit tokens: {error}") from None


def _count(splits: Sequence[NDArray[np.uint16]], world: World) -> int:
    """The largest token and one; rank 0 reads the files for all."""
    largest = 0
    if world.is_main:
        largest = max(
            int(split[start : start + CHUNK].max())
            for split in splits
            for start in range(0, len(split), CHUNK)
        )
    return int(world.broadcast_text(str(largest))) + 1
