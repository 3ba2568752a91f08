"""What does each rank draw? Seeds derived from the run's seed and the place of use.

Nothing is saved: a resumed run derives at step s what the uninterrupted run derived there.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed of 63 bits, independent for every purpose, such as ("dropout", rank, step)."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def set_seed(seed: int, *purpose: str | int) -> None:
    """Start torch's generators (CPU and GPU) for one purpose."""
    torch.manual_seed(derive(seed, *purpose))
