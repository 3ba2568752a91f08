"""Are two sets of weights equal to the last bit? One hash over names, shapes, types and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from train.checkpoint import manifest, read, shelf

SHOWN = 16
"""Digits of a hash that tables and summaries show."""


def of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of tensors by name, in 64 hexadecimal digits; their order does not matter."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(_bytes(tensor))
    return whole.hexdigest()


def short(tensor: torch.Tensor) -> str:
    """A fingerprint of one tensor in 16 hexadecimal digits."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()[:SHOWN]


def of_checkpoint(directory: Path) -> str:
    """The same hash of the weights in a checkpoint.

    Raises:
        Damaged: it is not what was written.
    """
    with shelf.reading(directory):
        stored = manifest.read(directory).tensors.values()
        weights = [tensor for tensor in stored if tensor.key[0] == "model"]
        tensors = read.whole(directory, weights)
        return of({manifest.dotted(tensor.key[1:]): numbers for tensor, numbers in tensors})


def _bytes(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()
