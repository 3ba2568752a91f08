"""Files that a user names."""

from __future__ import annotations

import glob
from pathlib import Path

from train.schema import ConfigError


def find(patterns: str, key: str = "data.path") -> list[Path]:
    """The files that patterns, separated by commas, name; a directory stands for all in it.

    Args:
        key: where the patterns come from, for the message.

    Raises:
        ConfigError: one names nothing.
    """
    found: list[Path] = []
    for pattern in patterns.split(","):
        names = sorted(glob.glob(pattern.strip(), recursive=True))  # noqa: PTH207 (absolute ones)
        matches = [Path(name) for name in names]
        nested = [sorted(match.rglob("*")) if match.is_dir() else [match] for match in matches]
        some = [path for paths in nested for path in paths if path.is_file()]
        if not some:
            raise ConfigError(f"{key}: '{pattern.strip()}' names no file")
        found += some
    return found


def read(path: Path) -> bytes:
    """All of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
