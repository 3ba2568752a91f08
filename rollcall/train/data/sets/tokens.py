"""Token files: consecutive unsigned integers, as nanoGPT and `rollcall tokenize` write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollcall.config.schema import ConfigError, Data
from rollcall.system.files import read_object
from rollcall.train.data.sets.windows import consecutive_windows
from rollcall.train.data.source import Source, data_set
from rollcall.train.data.tokenize import FACTS, TYPES
from rollcall.train.ranks.world import World

CHUNK_TOKENS = 2**24
"""Tokens that are read at once to find the largest."""


@data_set(
    reader=lambda config, classes: (
        lambda paths: consecutive_windows(
            np.concatenate([*map(mapped, paths)]), config.seq_len, classes, "the input"
        )
    )
)
def tokens(config: Data, world: World) -> Source:
    """Load samples of `data.seq_len` tokens from train.bin and val.bin, which are memory-mapped."""
    folder = Path(config.path or "")
    suffix = next((kind for kind in TYPES if (folder / f"train{kind}").exists()), ".bin")
    paths = [folder / f"{split}{suffix}" for split in ("train", "val")]
    seq_len, splits = config.seq_len, [mapped(path) for path in paths]
    known = (read_object(folder / FACTS) or {}).get("vocabulary")
    classes = config.num_classes or known or _count(splits, world)
    train, validation = (
        consecutive_windows(split, seq_len, classes, str(path))
        for split, path in zip(splits, paths, strict=True)
    )
    return Source(train, validation, shape=(seq_len,), classes=classes, is_shifted=True)


def mapped(path: Path) -> NDArray[Any]:
    """Map the tokens of a file into memory; ConfigError if it is not a token file."""
    try:
        return np.memmap(path, TYPES.get(path.suffix, TYPES[".bin"]), "r")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:  # it is empty, or has a part of a token
        raise ConfigError(f"{path}: expected whole tokens: {error}") from None


def _count(splits: Sequence[NDArray[Any]], world: World) -> int:
    largest = 0
    if world.is_main:
        largest = max(
            int(split[start : start + CHUNK_TOKENS].max())
            for split in splits
            for start in range(0, len(split), CHUNK_TOKENS)
        )
    return int(world.broadcast_text(str(largest))) + 1
