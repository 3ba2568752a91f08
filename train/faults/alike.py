"""Do replicas still hold the same weights? A fingerprint of a piece of them, another each step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

PIECE = 1 << 20
"""Numbers of a piece at most: reading them costs nothing beside a step."""
PRIME = 1048573
"""Fingerprints are smaller, so that their sums in fp32 are exact; one bit that flips changes it."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def piece(model: nn.Module, step: int) -> tuple[str, torch.Tensor]:
    """The tensor whose turn it is, by name, and what this rank holds of a piece of it."""
    names = dict(model.named_parameters())
    if not names:
        return "", torch.zeros(0)
    turn, number = divmod(step, len(names))
    name, weight = list(names.items())[number]
    numbers = (weight.to_local() if isinstance(weight, DTensor) else weight).detach().flatten()
    start = turn % max(1, math.ceil(len(numbers) / PIECE)) * PIECE
    return name, numbers[start : start + PIECE]


def fingerprint(numbers: torch.Tensor) -> torch.Tensor:
    """A number below 2^20 that depends on every bit, as fp32 on the same device."""
    bits = numbers.contiguous().view(INTEGERS[numbers.element_size()])
    # Sums of whole numbers are the same in every order.
    return bits.sum(dtype=torch.int64).remainder(PRIME).float()
