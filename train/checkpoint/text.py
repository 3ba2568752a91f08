"""What does a manifest look like on disk? JSON that ends in a digest of itself. No torch.

A stranger may have written it, so nothing of it is believed: names of files cannot leave the
directory, and no shape can make anybody allocate more than the files hold.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

from train.checkpoint.manifest import (
    ITEM_SIZES,
    NAME,
    Damaged,
    Key,
    Manifest,
    Piece,
    Stored,
    dotted,
)
from train.config import ConfigError

FORMAT = 2


def dump(manifest: Manifest) -> bytes:
    """The text of a manifest."""
    fields = {
        "format": FORMAT,
        "facts": manifest.facts,
        "files": manifest.files,
        "values": [[list(key), value] for key, value in manifest.values.values()],
        "tensors": [
            {
                "key": list(tensor.key),
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "pieces": [
                    {
                        "offset": piece.offset,
                        "shape": piece.shape,
                        "file": piece.file,
                        "start": piece.start,
                        "crc32": f"{piece.crc32:08x}",
                    }
                    for piece in tensor.pieces
                ],
            }
            for tensor in manifest.tensors.values()
        ],
    }
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def parse(data: bytes, directory: Path, whole: bool = True) -> Manifest:
    """Read the text of a manifest, and believe nothing of it.

    Args:
        directory: where it lies, for messages.
        whole: the pieces of every tensor must cover it.

    Raises:
        Damaged: it is not what was written, or promises what cannot be.
        ConfigError: another version of rollcall wrote it.
    """
    end = re.search(rb',"crc32":"([0-9a-f]{8})"}\n\Z', data[-32:])
    intact = end is not None and int(end[1], 16) == zlib.crc32(data[: -len(end[0])])
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged(f"{NAME} is not whole") from None
    version = fields.get("format") if isinstance(fields, dict) else None
    # The first format had no digest.
    if version == 1 or (intact and isinstance(version, int) and version > FORMAT):
        age = "an earlier" if version == 1 else "a newer"
        raise ConfigError(
            f"{directory} was written by {age} version of rollcall (format {version}; this one "
            f"reads {FORMAT}): go on with that version, or give this run another run.name"
        )
    if not intact or version != FORMAT:
        raise Damaged(f"{NAME} is not what was written: its digest differs")
    try:
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
        if any(key[:length] in keys for key in keys for length in range(1, len(key))):
            raise ValueError("a key leads through a tensor or a value")
        if sum(tensor.held for tensor in manifest.tensors.values()) != manifest.nbytes:
            raise ValueError("the tensors do not fill the files")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Damaged(f"{NAME} promises what cannot be: {error}") from None
    return manifest


def _tensor(entry: dict[str, Any], files: dict[str, int], whole: bool) -> Stored:
    key = _key(entry["key"])
    if entry["dtype"] not in ITEM_SIZES:
        raise ValueError(f"{dotted(key)} has the unknown type {entry['dtype']!r}")
    pieces = tuple(
        Piece(
            offset=_counts(piece["offset"]),
            shape=_counts(piece["shape"]),
            file=_file(piece["file"]),
            start=_count(piece["start"]),
            crc32=int(piece["crc32"], 16),
        )
        for piece in entry["pieces"]
    )
    tensor = Stored(key, entry["dtype"], _counts(entry["shape"]), pieces)
    for piece in pieces:
        boxes = zip(piece.offset, piece.shape, tensor.shape, strict=True)
        if any(offset + size > end for offset, size, end in boxes):
            raise ValueError(f"a piece of {dotted(key)} lies outside of its shape")
        if piece.start + tensor.size(piece) > files[piece.file]:
            raise ValueError(f"a piece of {dotted(key)} lies behind the end of {piece.file}")
    # Pieces that lie in files bound what a shape can make anybody allocate.
    if (whole and tensor.held != tensor.nbytes) or len(
        {piece.offset for piece in pieces if math.prod(piece.shape)}
    ) != sum(math.prod(piece.shape) > 0 for piece in pieces):
        raise ValueError(f"the pieces of {dotted(key)} do not cover its shape")
    return tensor


def _file(text: Any) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"rank-[0-9]{5,9}\.bin", text):
        raise ValueError(f"{text!r} is no name of a data file")
    return text


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is no count")
    return number


def _counts(numbers: Any) -> tuple[int, ...]:
    counts = tuple(_count(number) for number in numbers)
    if len(counts) > 64 or math.prod(max(count, 1) for count in counts) >= 2**63:
        raise ValueError(f"{str(numbers)[:80]} is no shape")
    return counts


def _key(parts: Any) -> Key:
    if not parts or not all(type(part) in (str, int) for part in parts):
        raise ValueError(f"{parts!r} is no key")
    return tuple(parts)
