"""Text as bytes: any files, by default the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data import files
from train.data.source import Source
from train.data.windows import Windows
from train.schema import ConfigError, Data
from train.world import World

BYTES = 256
HELD_OUT = 50


def text(config: Data, _world: World) -> Source:
    """Samples of `context` bytes, each with the byte that follows as target; every 50th validates.

    Raises:
        ConfigError: there are no such files, or too little is in them.
    """
    context, patterns = config.context, config.path or f"{sysconfig.get_path('stdlib')}/*.py"
    corpus = join(files.find(patterns))
    count = (len(corpus) - 1) // context
    if count < HELD_OUT:
        raise ConfigError(
            f"data.name=text: {patterns} holds {len(corpus)} bytes, which is less than {HELD_OUT} "
            f"samples of data.context={context}: take a smaller one, or more files in data.path"
        )
    held_out = count // HELD_OUT
    validation = Windows(
        corpus, context, BYTES, held_out, lambda rows: ((rows + 1) * HELD_OUT - 1) * context
    )
    train = Windows(
        corpus,
        context,
        BYTES,
        count - held_out,
        lambda rows: (rows + rows // (HELD_OUT - 1)) * context,
    )
    return Source(train, validation, len(train), len(validation), (context,), BYTES)


def join(paths: Sequence[Path]) -> NDArray[np.uint8]:
    """What the files hold, one after the other."""
    return np.frombuffer(b"".join(map(files.read, paths)), dtype=np.uint8)
