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
from rollcall.train.dist.run import Run

SAMPLES = 8
"""Samples of each split that are hashed."""


def check(run: Run, source: Source, resuming: bool) -> dict[str, Any]:
    """Compare the data with rank 0's and, if the run resumes, with the data before; record it.

    Raises:
        ConfigError: the data differs from rank 0's, or from what the run was trained on.
    """
    world, run_dir = run.world, run.run_dir
    mine = identify(run.config.data.name, source)
    others = differences(world.broadcast(mine), mine)
    world.raise_together(
        f"rank {world.rank} on {world.host} sees different data from rank 0: {others}. Give all "
        "nodes the same files"
        if others
        else ""
    )
    problem = ""
    if world.is_main and resuming:
        events = run_dir.read_events("data")
        changes = differences(events[-1], mine) if events else ""
        if changes:
            problem = (
                f"run {run_dir.name} was trained on different data: {changes}. Restore that data, "
                "or start a new run with another run.name"
            )
    world.raise_together(problem)
    run.record("data", **mine)
    return mine


def identify(name: str, source: Source) -> dict[str, Any]:
    """Return name, sizes, shape, and hashes of some samples; None for an unreadable one."""
    return {
        "name": name,
        "train": source.train_size,
        "validation": source.validation_size,
        "shape": list(source.shape),
        "classes": source.classes,
        "names": list(source.names),
        "content": [
            *_hashes(source.train, source.train_size, "the training data", source.form),
            *_hashes(source.validation, source.validation_size, "the validation data", source.form),
        ],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how two identities differ; an empty text if they are equal."""
    words = [
        f"{key} was {before[key]}, is {now[key]}"
        for key in ("name", "train", "validation", "shape", "classes")
        if before[key] != now[key]
    ]
    if not words and before["names"] != now["names"]:
        words = ["the names of the classes have changed"]
    changed = sum(
        old != new
        for old, new in zip(before["content"], now["content"], strict=False)
        if old is not None and new is not None
    )
    if not words and changed:
        words = [f"{changed} of {len(now['content'])} compared samples have changed"]
    return "; ".join(words)


def _hashes(dataset: Dataset[Any], size: int, what: str, form: Form) -> list[str | None]:
    count = min(size, SAMPLES)
    indices = [number * (size - 1) // max(1, count - 1) for number in range(count)]
    if isinstance(dataset, Stream):  # others than the first are read in order only
        indices = [0, 1][: size if size >= 0 else 2]
    return [_hash(dataset, index, what, form) for index in indices]


def _hash(dataset: Dataset[Any], index: int, what: str, form: Form) -> str | None:
    result = Reader(dataset, what, seed=0, form=form).read(Selection([index], [0], torch.ones(1)))
    if result.problems:
        return None
    raw = getattr(dataset, "raw", None)  # decoders may round differently on other machines
    digest = hashlib.blake2b(digest_size=8)
    if raw:
        digest.update(raw(index))
    else:
        for tensor in result.batch.tensors[:-1]:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
