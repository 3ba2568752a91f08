"""The manifest of a checkpoint: JSON that ends in its own checksum. No torch, no pickle.

It lists the position of each piece of each tensor and its CRC-32, which detects every flipped bit
and misses about one in 4 billion longer errors. Checksums do not protect against somebody who can
write to the directory, so a manifest is checked too: file names cannot leave the directory, and no
shape can allocate more than the files hold.
"""

import contextlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollcall.config import ConfigError
from rollcall.system.files import read_whole
from rollcall.train.checkpoint import contents
from rollcall.train.checkpoint.contents import Damaged, Key, Manifest, Piece, StoredTensor, dotted

NAME = "manifest.json"
FORMAT = 2
MAX_BYTES = 2**30
"""A larger manifest is refused unread: rollcall never writes one."""
MAX_LIST = 2**24
"""Entries of a list in a state; a reader makes all that are before the one that a key names."""


def dump(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum."""
    fields = {
        "format": FORMAT,
        "facts": manifest.facts,
        "files": manifest.files,
        "values": [[list(key), value] for key, value in manifest.values.values()],
        # The names and the order of the dataclasses' fields are part of the format.
        "tensors": [
            vars(tensor)
            | {"pieces": [vars(part) | {"crc32": f"{part.crc32:08x}"} for part in tensor.pieces]}
            for tensor in manifest.tensors.values()
        ],
    }
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def parse(data: bytes, directory: Path, whole: bool = True) -> Manifest:
    """Return the manifest with this text after checking all it says; raise as `read` does."""
    end = re.search(rb',"crc32":"([0-9a-f]{8})"}\n\Z', data[-32:])
    intact = end is not None and int(end[1], 16) == zlib.crc32(data[: -len(end[0])])
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged(f"{NAME} is cut off or is not JSON") from None
    version = fields.get("format") if isinstance(fields, dict) else None
    # Format 1 had no checksum.
    if version == 1 or (intact and isinstance(version, int) and version > FORMAT):
        age = "an earlier" if version == 1 else "a newer"
        raise ConfigError(
            f"{directory} was written by {age} version of rollcall (format {version} instead of "
            f"{FORMAT}): resume with that version, or start a new run with another run.name"
        )
    if not intact or version != FORMAT:
        raise Damaged(f"{NAME} is not what was written: its checksum differs")
    try:
        return _manifest(fields, whole)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Damaged(f"{NAME} is not valid: {error}") from None


def read(directory: Path, whole: bool = True) -> Manifest:
    """Read the manifest of a checkpoint, and check that the data files have the right sizes.

    If it is `whole`, as everywhere but on a node's own disk, pieces must cover every tensor. Raise
    Damaged, or ConfigError if another version of rollcall wrote it.
    """
    manifest = load(directory, whole)
    for file in manifest.files:
        if problem := size_problem(directory, manifest, file):
            raise Damaged(problem)
    return manifest


def load(directory: Path, whole: bool = True) -> Manifest:
    """Read the manifest of a checkpoint alone, and raise the same exceptions as `read`."""
    try:
        data = read_whole(directory / NAME, MAX_BYTES, os.O_NOFOLLOW)
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error.strerror}") from None
    return parse(data, directory, whole)


@contextlib.contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Add the checkpoint's path to the message of a `Damaged`."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{directory} is damaged: {error}") from None


def read_named(directory: Path) -> Manifest:
    """Read a manifest as `read` does, with the checkpoint's path in the message of a `Damaged`."""
    with naming(directory):
        return read(directory)


def size_problem(directory: Path, manifest: Manifest, file: str) -> str:
    """Return the problem with a data file's type or size; empty if both are right."""
    try:
        status = (directory / file).lstat()
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is not a regular file"
    if status.st_size != manifest.files[file]:
        return f"{file} has {status.st_size} bytes instead of {manifest.files[file]}"
    return ""


def _manifest(fields: dict[str, Any], whole: bool) -> Manifest:
    manifest = Manifest(
        files={_file(file): _count(size) for file, size in fields["files"].items()},
        tensors={},
        values={dotted(_key(key)): (_key(key), value) for key, value in fields["values"]},
        facts=dict(fields["facts"]),
    )
    tensors = (_tensor(entry, manifest.files, whole) for entry in fields["tensors"])
    manifest.tensors.update((tensor.name, tensor) for tensor in tensors)
    _count(manifest.facts["step"])
    keys = {key for key, _ in manifest.values.values()}
    keys |= {tensor.key for tensor in manifest.tensors.values()}
    kinds: dict[Key, type] = {(): str}  # of the next part of keys: a number in a list
    for key in keys:
        for length, part in enumerate(key):
            if key[:length] in keys or kinds.setdefault(key[:length], type(part)) is not type(part):
                raise ValueError("a key leads through a tensor or a value")
    if sum(tensor.stored_bytes for tensor in manifest.tensors.values()) != manifest.nbytes:
        raise ValueError("the tensors do not fill the files")
    return manifest


def _tensor(entry: dict[str, Any], files: dict[str, int], whole: bool) -> StoredTensor:
    key = _key(entry["key"])
    if entry["dtype"] not in contents.ITEM_SIZES:
        raise ValueError(f"{dotted(key)} has the unknown type {entry['dtype']!r}")
    pieces = tuple(map(_piece, entry["pieces"]))
    tensor = StoredTensor(key, entry["dtype"], _counts(entry["shape"]), pieces)
    for piece in pieces:
        spans = zip(piece.offset, piece.shape, tensor.shape, strict=True)
        if any(offset + size > end for offset, size, end in spans):
            raise ValueError(f"a piece of {dotted(key)} lies outside its shape")
        if piece.start + tensor.size(piece) > files[piece.file]:
            raise ValueError(f"a piece of {dotted(key)} lies beyond the end of {piece.file}")
    # The files bound what a reader allocates, as long as the pieces cover the shape.
    offsets = [piece.offset for piece in pieces if math.prod(piece.shape)]
    if (whole and tensor.stored_bytes != tensor.nbytes) or len(set(offsets)) != len(offsets):
        raise ValueError(f"the pieces of {dotted(key)} do not cover its shape")
    return tensor


def _piece(entry: dict[str, Any]) -> Piece:
    of_bytes = _file(entry["file"]), _count(entry["start"]), int(entry["crc32"], 16)
    return Piece(_counts(entry["offset"]), _counts(entry["shape"]), *of_bytes)


def _file(text: Any) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"rank-[0-9]{5,9}\.bin", text):
        raise ValueError(f"{text!r} is not the name of a data file")
    return text


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is not a count")
    return number


def _counts(numbers: Any) -> tuple[int, ...]:
    counts = tuple(_count(number) for number in numbers)
    if len(counts) > 64 or math.prod(max(count, 1) for count in counts) >= 2**63:
        raise ValueError(f"{str(numbers)[:80]} is not a shape")
    return counts


def _key(parts: Any) -> Key:
    is_key = [type(part) is str or (type(part) is int and 0 <= part < MAX_LIST) for part in parts]
    if not parts or not all(is_key):
        raise ValueError(f"{parts!r} is not a key")
    return tuple(parts)
