"""Is every byte of a checkpoint what was written? No torch."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from train.checkpoint import manifest, shelf
from train.checkpoint.manifest import Damaged, Manifest, open_regular

BLOCK = 2**20


def problems(directory: Path) -> list[str]:
    """What is wrong, a line for each damaged file; nothing if the checkpoint is whole.

    Raises:
        ConfigError: another version of rollcall wrote it.
    """
    with shelf.reading(directory):
        return _problems(directory)


def _problems(directory: Path) -> list[str]:
    try:
        stored = manifest.load(directory)
    except Damaged as error:
        return [str(error)]
    found = []
    for file in stored.files:
        problem = manifest.size_problem(directory, stored, file)
        if not problem:
            try:
                problem = _differs(directory, stored, file)
            except OSError as error:
                problem = f"{file} cannot be read: {error.strerror}"
        if problem:
            found.append(problem)
    known = {*stored.files, manifest.NAME}
    extra = sorted(path.name for path in directory.iterdir() if path.name not in known)
    return found + [f"{name} does not belong to it" for name in extra]


def _differs(directory: Path, stored: Manifest, file: str) -> str:
    names = []
    descriptor = open_regular(directory / file)
    try:
        for tensor in stored.tensors.values():
            pieces = [piece for piece in tensor.pieces if piece.file == file]
            wrong = [
                piece
                for piece in pieces
                if _crc32(descriptor, piece.start, tensor.size(piece)) != piece.crc32
            ]
            names += [tensor.name] * bool(wrong)
    finally:
        os.close(descriptor)
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{file} is not what was written: {', '.join(names[:3])}{more} differ"


def _crc32(descriptor: int, start: int, size: int) -> int:
    crc32 = 0
    while size:
        block = os.pread(descriptor, min(size, BLOCK), start)
        if not block:
            break
        crc32 = zlib.crc32(block, crc32)
        start, size = start + len(block), size - len(block)
    return crc32
