"""How does a checkpoint come to disk? Each rank writes its part; rank 0 publishes. No torch.

This runs beside the training, in a forked process or a thread, and uses no collectives.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train.checkpoint import manifest, shelf, text
from train.checkpoint.manifest import Key, Manifest, Piece, Stored
from train.run import sync

BLOCK = 2**20  # bytes that are digested and then written while they are in the cache
AHEAD = 2**22  # bytes that are worth setting the disk to work, so that fsync has less to wait for
WRITERS = 2
_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@dataclass(frozen=True)
class Box:
    """A box of a tensor that one rank writes."""

    key: Key
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * manifest.ITEM_SIZES[self.dtype]


Item = tuple[Box, Callable[[], memoryview]]
"""A box, and how its bytes are got when their turn has come."""


def write_part(
    directory: Path, rank: int, items: Sequence[Item], values: Sequence[tuple[Key, Any]]
) -> None:
    """Write what one rank has, and bring it to disk: raw bytes, and an index of them.

    Raises:
        OSError: it could not be written.
        Damaged: it could not be read from where it comes.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file, start = f"rank-{rank:05d}.bin", 0
    index: dict[str, Any] = {"size": 0, "values": values, "boxes": []}
    if items:
        starts = [0, *itertools.accumulate(box.nbytes for box, _ in items)]
        start = starts.pop()
        with _create(directory / file) as data:
            # While one thread writes, another digests.
            with ThreadPoolExecutor(WRITERS) as pool:
                put = partial(_put, data.fileno())
                digests = list(pool.map(put, (read for _, read in items), starts))
            os.fsync(data.fileno())
        for (box, _), place, crc32 in zip(items, starts, digests, strict=True):
            index["boxes"].append([*vars(box).values(), place, crc32])
    index["size"] = start
    with _create(_index(directory, rank)) as data:
        data.write(json.dumps(index).encode())


def publish(
    written: Path,
    final: Path,
    ranks: Sequence[int],
    facts: dict[str, Any],
    check: Callable[[], object],
    whole: bool = True,
) -> None:
    """Join the parts under a manifest, bring all to disk, and give the checkpoint its name.

    Args:
        written: where the parts of these ranks lie.
        check: called last before the rename; what it raises stops the publishing.
        whole: the parts must make up the whole state.

    Raises:
        OSError: it could not be written.
        Damaged: the parts do not make up the whole state.
    """
    indexes = {rank: json.loads(_index(written, rank).read_bytes()) for rank in ranks}
    data = text.dump(join(indexes, facts))
    text.parse(data, written, whole)
    with _create(written / manifest.NAME) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    manifest.read(written, whole)
    for rank in ranks:
        _index(written, rank).unlink()
    sync(written)
    check()
    shelf.publish(written, final)


def join(indexes: Mapping[int, dict[str, Any]], facts: dict[str, Any]) -> Manifest:
    """The manifest of the ranks' parts."""
    whole = Manifest({}, {}, {}, facts)
    pieces: dict[Key, list[Piece]] = {}
    about: dict[Key, tuple[str, tuple[int, ...]]] = {}
    for rank, index in indexes.items():
        file = f"rank-{rank:05d}.bin"
        if index["boxes"]:
            whole.files[file] = index["size"]
        for key, value in index["values"]:
            whole.values[manifest.dotted(key)] = (tuple(key), value)
        for key, dtype, shape, offset, part, start, crc32 in index["boxes"]:
            about[tuple(key)] = dtype, tuple(shape)
            piece = Piece(tuple(offset), tuple(part), file, start, crc32)
            pieces.setdefault(tuple(key), []).append(piece)
    for key, (dtype, shape) in about.items():
        ordered = sorted(pieces[key], key=lambda piece: piece.offset)
        whole.tensors[manifest.dotted(key)] = Stored(key, dtype, shape, tuple(ordered))
    return whole


def _index(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _put(file: int, read: Callable[[], memoryview], start: int) -> int:
    """Write bytes at a place in a file; their CRC-32."""
    view, crc32 = read(), 0
    for first in range(0, len(view), BLOCK):
        block, place = view[first : first + BLOCK], start + first
        crc32 = zlib.crc32(block, crc32)
        while block:
            count = os.pwrite(file, block, place)
            block, place = block[count:], place + count
    if len(view) >= AHEAD:
        _LIBC.sync_file_range(file, start, len(view), _SYNC_FILE_RANGE_WRITE)
    return crc32


def _create(path: Path) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")  # noqa: PTH123
