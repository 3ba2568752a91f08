"""Is every byte of a checkpoint what was written? No torch."""

import os
import zlib
from pathlib import Path

from rollcall.text import listed
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Damaged, Manifest

BLOCK = 2**20
"""Bytes read at once."""


def problems(directory: Path) -> list[str]:
    """Return a line for each damaged file; ConfigError if another version of rollcall wrote it."""
    with layout.reading(directory):
        try:
            stored = manifest.load(directory)
        except Damaged as error:
            return [str(error)]
        found = [_problem(directory, stored, file) for file in stored.files]
        known = {*stored.files, manifest.NAME}
        extra = sorted(path.name for path in directory.iterdir() if path.name not in known)
    return [*filter(None, found), *(f"{name} does not belong to the checkpoint" for name in extra)]


def _problem(directory: Path, stored: Manifest, file: str) -> str:
    if problem := manifest.size_problem(directory, stored, file):
        return problem
    try:
        with open(manifest.open_regular(directory / file), "rb") as data:  # noqa: PTH123
            names = [
                tensor.name
                for tensor in stored.tensors.values()
                if any(
                    _crc32(data.fileno(), piece.start, tensor.size(piece)) != piece.crc32
                    for piece in tensor.pieces
                    if piece.file == file
                )
            ]
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    verb = "differs" if len(names) == 1 else "differ"
    return f"{file} is not what was written: {listed(names)} {verb}" if names else ""


def _crc32(descriptor: int, start: int, size: int) -> int:
    crc32 = 0
    while size and (block := os.pread(descriptor, min(size, BLOCK), start)):
        crc32 = zlib.crc32(block, crc32)
        start, size = start + len(block), size - len(block)
    return crc32
