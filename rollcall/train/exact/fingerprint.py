"""Hash weights: their names, shapes, types and bytes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollcall.train.checkpoint import layout, manifest, read
from rollcall.train.checkpoint.contents import dotted


def of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of named tensors in 64 hexadecimal digits; their order does not matter."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(numbers(tensor))
    return whole.hexdigest()


def short(tensor: torch.Tensor) -> str:
    """Return a hash of one tensor's bytes in 16 hexadecimal digits."""
    return hashlib.sha256(numbers(tensor)).hexdigest()[:16]


def of_checkpoint(directory: Path) -> str:
    """Return the hash that `of` gives for a checkpoint's weights; Damaged if it is damaged."""
    with layout.reading(directory):
        stored = manifest.read(directory).tensors.values()
        weights = [tensor for tensor in stored if tensor.key[0] == "model"]
        tensors = read.whole(directory, weights)
        return of({dotted(tensor.key[1:]): values for tensor, values in tensors})


def numbers(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor of any type, as an array on the CPU."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()
