"""States to save, and ways to damage or forge a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollcall.train.checkpoint import write
from rollcall.train.checkpoint.engine import Engine, restore


def state(seed: int) -> dict[str, Any]:
    """Return tensors and values of several types, determined by the seed."""
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


def save(engine: Engine, step: int, saved: dict[str, Any], **facts: Any) -> None:
    """Save a state and wait until it is published; OSError if that fails."""
    engine.begin(step, saved, **facts)
    result = engine.drain()
    if result and result.problem:
        raise OSError(result.problem)


def restored(engine: Engine, fresh: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Return the newest intact step, and the fresh state filled from it; None if nothing is."""
    found = restore([engine], lambda: fresh)
    return found and (found.step, found.state)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two states are equal to the last bit."""
    for name, tensor in expected["model"].items():
        assert found["model"][name].dtype == tensor.dtype
        assert torch.equal(found["model"][name], tensor), name
    assert found["optim"] == expected["optim"]


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of a manifest and give it a valid digest."""
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    change(fields)
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))


def entry_of(fields: dict[str, Any], name: str) -> Any:
    """Return a tensor's entry in a manifest."""
    return next(entry for entry in fields["tensors"] if entry["key"][-1] == name)


def cut(path: Path) -> None:
    """Remove the last byte of a file."""
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    """Remove the content of a file."""
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def stopped(
    *words: Any, write_part: Callable[..., object] = write.write_part, **named: Any
) -> None:
    """Stop this process, and write the part once somebody continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)
    write_part(*words, **named)
