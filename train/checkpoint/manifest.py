"""What is in a checkpoint? Its manifest: JSON that ends in a digest of itself. No torch, no pickle.

A checkpoint is a directory: `manifest.json`, and a file of raw tensor bytes from each rank that
wrote any. The manifest says where each piece of each tensor lies, with its CRC-32. That finds
damage (a flipped bit always, longer damage but once in four thousand million) at more than 1 GB/s,
beside the writing; it is no defence against somebody who can write to the directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
LARGEST = 2**30  # bytes of a manifest that are read; more was not written by us
ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
Key = tuple[str | int, ...]  # the way to a value in the nested state


class Damaged(Exception):
    """A checkpoint that is not what was written: the message names file, tensor and problem."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: whole rows of what one rank held, at a place in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    crc32: int


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint and its pieces, which cover it (or this node's part of it)."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """The dotted name."""
        return dotted(self.key)

    @property
    def item_size(self) -> int:
        """Bytes of one number."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_size

    @property
    def held(self) -> int:
        """Bytes of all its pieces."""
        return sum(map(self.size, self.pieces))

    def size(self, piece: Piece) -> int:
        """Bytes of a piece."""
        return math.prod(piece.shape) * self.item_size


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds.

    Attributes:
        files: bytes of each data file.
        tensors: by their dotted names.
        values: numbers, texts and lists of them by dotted names, each with its key.
        facts: step, time, torch, world_size, mesh, config and what else was noted on saving.
    """

    files: dict[str, int]
    tensors: dict[str, Stored]
    values: dict[str, tuple[Key, Any]]
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """How many updates the state contains."""
        return int(self.facts["step"])

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.files.values())


def dotted(key: Key) -> str:
    """The dotted name of a key."""
    return ".".join(map(str, key))


def read(directory: Path, whole: bool = True) -> Manifest:
    """The manifest of a checkpoint; what it promises of files is checked against their sizes.

    Args:
        whole: the pieces of every tensor must cover it; on a node's own disk they need not.

    Raises:
        Damaged: manifest or files are not what was written.
        ConfigError: another version of rollcall wrote it.
    """
    manifest = load(directory, whole)
    for file in manifest.files:
        problem = size_problem(directory, manifest, file)
        if problem:
            raise Damaged(problem)
    return manifest


def load(directory: Path, whole: bool = True) -> Manifest:
    """The manifest alone.

    Args:
        whole: as for `read`.

    Raises:
        Damaged: it is not what was written.
        ConfigError: another version of rollcall wrote it.
    """
    from train.checkpoint.text import parse

    try:
        data = _read(directory / NAME)
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error.strerror}") from None
    return parse(data, directory, whole)


@contextlib.contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Let the message about damage name the checkpoint, too."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{directory} is damaged: {error}") from None


def read_named(directory: Path) -> Manifest:
    """`read`, for a message that names the checkpoint, too."""
    with naming(directory):
        return read(directory)


def size_problem(directory: Path, manifest: Manifest, file: str) -> str:
    """What is wrong with a data file as far as its size tells, or nothing."""
    try:
        status = (directory / file).lstat()
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is no regular file"
    if status.st_size != manifest.files[file]:
        return f"{file} has {status.st_size} bytes instead of {manifest.files[file]}"
    return ""


def open_regular(path: Path) -> int:
    """Open a file for reading; links, pipes and devices are refused.

    Raises:
        Damaged: it is no regular file.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK a pipe in the place of a file would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is no regular file")
    return descriptor


def _read(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise Damaged(f"{path.name} has more than {LARGEST} bytes")
    return data
