"""How do weights leave a checkpoint? As one file that other programs read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from train.checkpoint import manifest, shelf
from train.checkpoint.read import view, whole
from train.config import ConfigError

SAFETENSORS = {  # https://github.com/huggingface/safetensors#format
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


def read(path: Path) -> dict[str, Any]:
    """The whole state of a checkpoint, nested as it was saved; everything is checked.

    Raises:
        Damaged: it is not what was written.
        ConfigError: another version of rollcall wrote it.
    """
    state: dict[str, Any] = {}
    with shelf.reading(path):
        stored = manifest.read(path)
        for tensor, numbers in whole(path, stored.tensors.values()):
            _put(state, tensor.key, numbers)
    for key, value in stored.values.values():
        _put(state, key, value)
    return state


def to_safetensors(path: Path, target: Path, part: str | None) -> int:
    """Write the tensors to one safetensors file, which other programs read and map.

    Args:
        part: only what is under this first key, such as `model`, without it in the names.

    Returns:
        How many tensors were written.

    Raises:
        Damaged: the checkpoint is not what was written.
        ConfigError: a type that the format does not know, or nothing under this key.
    """
    with shelf.reading(path), _beside(target) as file:
        stored = manifest.read(path)
        chosen = _chosen(path, stored, part)
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(stored.step)}}
        end = 0
        for name, tensor in chosen.items():
            if tensor.dtype not in SAFETENSORS:
                raise ConfigError(f"safetensors knows no {tensor.dtype}, as {name} is")
            header[name] = {
                "dtype": SAFETENSORS[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, numbers in whole(path, chosen.values()):
            assert tensor.nbytes == numbers.nbytes
            file.write(view(numbers))
    return len(chosen)


def to_torch(path: Path, target: Path, part: str | None) -> int:
    """Write tensors and values to one file for torch.load, which needs no unpickling of objects.

    Args:
        part: only what is under this first key, such as `model`.

    Returns:
        How many tensors were written.

    Raises:
        Damaged: the checkpoint is not what was written.
        ConfigError: it has nothing under this key.
    """
    with shelf.reading(path), _beside(target) as file:
        chosen = _chosen(path, manifest.read(path), part)
        state = read(path)
        torch.save(state if part is None else state[part], file)
        return len(chosen)


def _chosen(path: Path, stored: manifest.Manifest, part: str | None) -> dict[str, manifest.Stored]:
    chosen = {
        manifest.dotted(tensor.key[part is not None :]): tensor
        for tensor in stored.tensors.values()
        if part in (None, tensor.key[0])
    }
    if part and not chosen:
        raise ConfigError(f"{path} holds no tensor under {part}: --all exports what it holds")
    return chosen


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole and on disk."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _put(state: dict[str, Any], key: manifest.Key, value: Any) -> None:
    inner: Any = state
    for part in key[:-1]:
        inner = inner.setdefault(part, {})
    inner[key[-1]] = value
