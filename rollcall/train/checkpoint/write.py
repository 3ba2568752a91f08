"""Each rank writes its part of a checkpoint, and one publishes all. No torch, no collectives."""

import ctypes
import itertools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.system.files import sync
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Chunk, Key, Manifest, Piece, StoredTensor, dotted

BLOCK = 2**20
"""Bytes that are checksummed while they are in the processor's cache for writing or reading."""
EARLY_SYNC = 2**22
"""From this many bytes on, the disk starts writing at once, so that fsync has less to wait for."""
WRITERS = 2
"""Threads per rank: while one waits for the disk, another computes checksums."""
_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


ChunkSource = tuple[Chunk, Callable[[], memoryview]]
"""A chunk, and a function that returns its bytes when they are to be written."""


def write_part(
    directory: Path, rank: int, chunks: Sequence[ChunkSource], values: Sequence[tuple[Key, Any]]
) -> None:
    """Write and sync one rank's part: a file of raw bytes, and its index."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)  # whatever umask the user's code has set
    index: dict[str, Any] = {"size": 0, "values": values, "boxes": []}
    if chunks:
        sizes = (chunk.nbytes for chunk, _ in chunks)
        *starts, index["size"] = itertools.accumulate(sizes, initial=0)
        with _create(directory / _data_name(rank)) as data:
            with ThreadPoolExecutor(WRITERS) as pool:
                put = partial(_put, data.fileno())
                checksums = list(pool.map(put, (source for _, source in chunks), starts))
            os.fsync(data.fileno())
        for (chunk, _), start, crc32 in zip(chunks, starts, checksums, strict=True):
            index["boxes"].append([*vars(chunk).values(), start, crc32])
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
    """Join the parts and publish them, unless `check` raises; raise Damaged if one is missing."""
    indexes = {rank: json.loads(_index(written, rank).read_bytes()) for rank in ranks}
    with _create(written / manifest.NAME) as file:
        file.write(manifest.dump(join(indexes, facts)))
        file.flush()
        os.fsync(file.fileno())
    manifest.read(written, whole)
    for rank in ranks:
        _index(written, rank).unlink()
    sync(written)
    check()
    layout.publish(written, final)


def join(indexes: Mapping[int, dict[str, Any]], facts: dict[str, Any]) -> Manifest:
    """Return the manifest of the parts whose indexes are given by rank."""
    joined = Manifest({}, {}, {}, facts)
    pieces: dict[Key, list[Piece]] = {}
    forms: dict[Key, tuple[str, tuple[int, ...]]] = {}
    for rank, index in indexes.items():
        file = _data_name(rank)
        if index["boxes"]:
            joined.files[file] = index["size"]
        for key, value in index["values"]:
            joined.values[dotted(key)] = (tuple(key), value)
        for key, dtype, whole, offset, shape, start, crc32 in index["boxes"]:
            forms[tuple(key)] = dtype, tuple(whole)
            piece = Piece(tuple(offset), tuple(shape), file, start, crc32)
            pieces.setdefault(tuple(key), []).append(piece)
    for key, (dtype, whole) in forms.items():
        ordered = sorted(pieces[key], key=lambda piece: piece.offset)
        joined.tensors[dotted(key)] = StoredTensor(key, dtype, whole, tuple(ordered))
    return joined


def _data_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def writers(directory: Path) -> list[int]:
    """Return the ranks that have written their parts into a directory."""
    return [int(path.stem.removeprefix("rank-")) for path in directory.glob("rank-*.json")]


def _index(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _put(file: int, source: Callable[[], memoryview], start: int) -> int:
    view, crc32 = source(), 0
    for first in range(0, len(view), BLOCK):
        block, offset = view[first : first + BLOCK], start + first
        crc32 = zlib.crc32(block, crc32)
        while block:
            count = os.pwrite(file, block, offset)
            block, offset = block[count:], offset + count
    if len(view) >= EARLY_SYNC:
        _LIBC.sync_file_range(file, start, len(view), _SYNC_FILE_RANGE_WRITE)
    return crc32


def _create(path: Path) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return open(descriptor, "wb")  # noqa: PTH123
