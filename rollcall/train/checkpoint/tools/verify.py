"""Verification of every byte of a checkpoint. No torch."""

import os
import zlib
from pathlib import Path

from rollcall.messages.text import listed
from rollcall.system.files import open_regular
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Damaged, Manifest
from rollcall.train.checkpoint.write import BLOCK


def problems(directory: Path) -> list[str]:
    """Return a line for each damaged file; ConfigError if another version of rollcall wrote it."""
    with layout.reading(directory):
        try:
            stored = manifest.load(directory)
        except Damaged as error:
            return [str(error)]
        damaged = [_problem(directory, stored, file) for file in stored.files]
        known = {*stored.files, manifest.NAME}
        extra = sorted(path.name for path in directory.iterdir() if path.name not in known)
    unknown = [f"{name} does not belong to the checkpoint" for name in extra]
    return [*filter(None, damaged), *unknown]


def _problem(directory: Path, stored: Manifest, file: str) -> str:
    if problem := manifest.size_problem(directory, stored, file):
        return problem
    try:
        with open_regular(directory / file, os.O_NOFOLLOW) as data:
            names = []
            for tensor in stored.tensors.values():
                pieces = [piece for piece in tensor.pieces if piece.file == file]
                spans = [(piece.start, tensor.size(piece)) for piece in pieces]
                if [_crc32(data.fileno(), *span) for span in spans] != [p.crc32 for p in pieces]:
                    names.append(tensor.name)
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
