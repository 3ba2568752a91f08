"""Detect data that has changed, by a few facts and hashed samples of the data set."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from rollcall.train.data.form import Form
from rollcall.train.data.reader import Reader, Selection
from rollcall.train.data.source import Source
from rollcall.train.data.stream import Stream
from rollcall.train.ranks.run import Run

HASHED_SAMPLES = 8
"""Samples of each split that are hashed."""


def check(run: Run, source: Source, resuming: bool) -> dict[str, Any]:
    """Record and return the data's identity; ConfigError if rank 0's or an earlier one differs."""
    world, run_dir = run.world, run.run_dir
    identity, problem = identify(run.config.data.name, source), ""
    if changes := differences(world.broadcast(identity), identity):
        problem = (
            f"rank {world.rank} on {world.host} sees different data from rank 0: {changes}. Give "
            "all nodes the same files"
        )
    if world.is_main and resuming:
        events = run_dir.read_events("data")
        if changes := differences(events[-1], identity) if events else "":
            problem = (
                f"run {run_dir.name} was trained on different data: {changes}. Restore that data, "
                "or start a new run with another run.name"
            )
    world.raise_together(problem)
    run.record("data", **identity)
    return identity


def identify(name: str, source: Source) -> dict[str, Any]:
    """Return name, sizes, shape, and hashes of some samples; None for an unreadable sample."""
    return {
        "name": name,
        "train": source.train_size,
        "validation": source.validation_size,
        "shape": list(source.shape),
        "classes": source.classes,
        "names": list(source.names),
        "content": [
            *_hashes(source.train, source.train_size, "training", source.form),
            *_hashes(source.validation, source.validation_size, "validation", source.form),
        ],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the differences of two identities; empty if they are equal."""
    keys = "name", "train", "validation", "shape", "classes"
    words = [f"{key} was {before[key]}, is {now[key]}" for key in keys if before[key] != now[key]]
    if not words and before["names"] != now["names"]:
        words = ["the names of the classes have changed"]
    pairs = zip(before["content"], now["content"], strict=False)
    changed = sum(old != new for old, new in pairs if None not in (old, new))
    if not words and changed:
        words = [f"{changed} of {len(now['content'])} compared samples have changed"]
    return "; ".join(words)


def _hashes(dataset: Dataset[Any], size: int, split: str, form: Form) -> list[str | None]:
    count = min(size, HASHED_SAMPLES)
    indices = [number * (size - 1) // max(1, count - 1) for number in range(count)]
    if isinstance(dataset, Stream):  # which would have to be read up to later samples
        indices = [0, 1][: size if size >= 0 else 2]
    reader = Reader(dataset, f"the {split} data", 0, form)
    return [_hash(reader, dataset, index) for index in indices]


def _hash(reader: Reader, dataset: Dataset[Any], index: int) -> str | None:
    result = reader.read(Selection([index], [0], torch.ones(1)))
    if result.problems:
        return None
    raw = getattr(dataset, "raw", None)  # decoders may round differently on other machines
    if raw:
        return hashlib.blake2b(raw(index), digest_size=8).hexdigest()
    digest = hashlib.blake2b(digest_size=8)
    for tensor in result.batch.tensors[:-1]:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
