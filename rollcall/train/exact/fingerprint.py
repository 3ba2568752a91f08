"""Hash weights: their names, shapes, types and bytes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


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


def numbers(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor of any type, as an array on the CPU."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()
