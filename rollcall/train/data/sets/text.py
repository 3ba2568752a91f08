"""Text as bytes: any files, by default the source code of Python's standard library."""

import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data import files
from rollcall.train.data.sets.windows import Windows, consecutive_windows
from rollcall.train.data.source import Source, data_set
from rollcall.train.ranks.world import World

VOCABULARY = 256
HELD_OUT = 50
"""One sample of this many is for validation."""


@data_set(
    reader=lambda config, _: (
        lambda paths: consecutive_windows(join(paths), config.seq_len, VOCABULARY, "the input")
    )
)
def text(config: Data, _world: World) -> Source:
    """Load samples of `data.seq_len` bytes and the bytes that follow; every 50th for validation."""
    seq_len, patterns = config.seq_len, config.path or f"{sysconfig.get_path('stdlib')}/*.py"
    corpus = join(files.find(patterns))
    count = (len(corpus) - 1) // seq_len
    if count < HELD_OUT:
        raise ConfigError(
            f"data.name=text: {patterns} has {len(corpus)} bytes, fewer than {HELD_OUT} samples of "
            f"data.seq_len={seq_len}; reduce it, or add files to data.path"
        )
    held_out = count // HELD_OUT
    windows = partial(Windows, corpus, seq_len, VOCABULARY)
    train = windows(count - held_out, lambda index: (index + index // (HELD_OUT - 1)) * seq_len)
    validation = windows(held_out, lambda index: ((index + 1) * HELD_OUT - 1) * seq_len)
    return Source(train, validation, shape=(seq_len,), classes=VOCABULARY, is_shifted=True)


def join(paths: Sequence[Path]) -> NDArray[np.uint8]:
    """Return the concatenated content of files."""
    return np.frombuffer(b"".join(map(files.read, paths)), dtype=np.uint8)
