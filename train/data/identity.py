"""Is it the same data? A few facts and samples of a data set, recorded in the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from train.data.reading import Pick, Reader
from train.data.source import Source
from train.run import RunDir, read_lines
from train.world import World

SAMPLES = 8


def check(world: World, run_dir: RunDir, name: str, source: Source, resuming: bool) -> Any:
    """Identify the data, compare it with the other ranks' and with what the run began on.

    Args:
        name: `data.name`.
        resuming: whether the run continues from a checkpoint.

    Returns:
        The identity, as the run's events and checkpoints record it.

    Raises:
        ConfigError: a rank sees other data than rank 0, or the run has learned from other data.
    """
    mine = identify(name, source)
    text = world.broadcast_text(json.dumps(mine))
    others = differences(json.loads(text), mine)
    world.raise_together(
        f"rank {world.rank} on {world.host} sees other data than rank 0: {others}. Let all nodes "
        "have the same files"
        if others
        else ""
    )
    problem = ""
    if world.is_main and resuming:
        events = [line for line in read_lines(run_dir.events) if line["event"] == "data"]
        changes = differences(events[-1], mine) if events else ""
        if changes:
            problem = (
                f"run {run_dir.name} has learned from other data: {changes}. Bring that data back, "
                "or give this run another run.name to start afresh"
            )
    world.raise_together(problem)
    if world.is_main:
        run_dir.record("data", **mine)
    return mine


def identify(name: str, source: Source) -> dict[str, Any]:
    """Name, sizes, shape, and hashes of some samples; None for one that cannot be read."""
    return {
        "name": name,
        "train": source.train_size,
        "validation": source.validation_size,
        "shape": list(source.shape),
        "classes": source.classes,
        "names": list(source.names),
        "content": [
            *_hashes(source.train, source.train_size),
            *_hashes(source.validation, source.validation_size),
        ],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two identities differ, in words; nothing if they do not."""
    words = [
        f"{key} was {before[key]}, is {now[key]}"
        for key in ("name", "train", "validation", "shape", "classes")
        if before[key] != now[key]
    ]
    if not words and before["names"] != now["names"]:
        words = ["the classes have other names"]
    changed = sum(
        old != new
        for old, new in zip(before["content"], now["content"], strict=False)
        if old is not None and new is not None
    )
    if not words and changed:
        words = [f"{changed} of {len(now['content'])} samples that were compared have changed"]
    return "; ".join(words)


def _hashes(dataset: Dataset[Any], size: int) -> list[str | None]:
    count = min(size, SAMPLES)
    rows = [number * (size - 1) // max(1, count - 1) for number in range(count)]
    return [_hash(dataset, row) for row in rows]


def _hash(dataset: Dataset[Any], row: int) -> str | None:
    fetched = Reader(dataset, "", seed=0).read(Pick([row], [0], torch.ones(1)))
    if fetched.problems:
        return None
    raw = getattr(dataset, "raw", None)  # decoders may round differently on another machine
    digest = hashlib.blake2b(digest_size=8)
    if raw:
        digest.update(raw(row))
    else:
        for tensor in fetched.batch[:2]:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
