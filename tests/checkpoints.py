"""States to save, damage, writers that wait, and manifests that lie."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from train.checkpoint import write


def state(seed: int) -> dict[str, Any]:
    """Tensors of several kinds, and values, that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 200, generator=generator),  # two pieces
            "transposed": torch.randn(7, 5, generator=generator).t(),
            "scalar": torch.randn((), generator=generator),
            "empty": torch.empty(0, 3),
            "half": torch.randn(9, generator=generator).bfloat16(),
            "mask": torch.arange(11) > seed,
        },
        "optim": {"lr": 0.1 * seed, "betas": (0.9, 0.999), "foreach": None, "fused": False},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """See that two states are equal to the last bit."""
    for name, tensor in expected["model"].items():
        assert found["model"][name].dtype == tensor.dtype
        assert torch.equal(found["model"][name], tensor), name
    assert found["optim"] == expected["optim"]


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a manifest that says what we want, with the digest that belongs to it."""
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    change(fields)
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))


def entry_of(fields: dict[str, Any], name: str) -> Any:
    """What a manifest tells of a tensor."""
    return next(entry for entry in fields["tensors"] if entry["key"][-1] == name)


def cut(path: Path) -> None:
    """Take the last byte of a file away."""
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    """Take everything out of a file."""
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Turn a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def stopped(
    *words: Any, write_part: Callable[..., object] = write.write_part, **named: Any
) -> None:
    """Write a part when somebody lets this process go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    write_part(*words, **named)
