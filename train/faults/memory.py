"""What happens when memory runs out in a step: who noticed, what was there, what is proposed?"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from train.config import Config
from train.run import RunDir, write_atomic
from train.world import World

# What the allocators of a CPU say: https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp
HOST_MESSAGES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
FILE = "micro-batch.json"


def is_exhausted(error: Exception) -> bool:
    """Whether this exception says that a GPU or the host had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in HOST_MESSAGES)


def snapshot(run_dir: RunDir, step: int, rank: int) -> None:
    """Write what the allocator of the GPU holds, for https://pytorch.org/memory_viz."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError):  # the disk may be full as well
            faults_of(run_dir).mkdir(exist_ok=True)
            path = faults_of(run_dir) / f"memory-step-{step:08d}-rank-{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def propose(run_dir: RunDir, micro_batch: int) -> None:
    """Let the next attempt of this run take so many samples at once."""
    place = faults_of(run_dir)
    place.mkdir(exist_ok=True)
    write_atomic(place / FILE, json.dumps({"micro_batch": micro_batch}) + "\n")


def with_proposal(config: Config, run_dir: RunDir, world: World) -> Config:
    """The configuration with the micro-batch that an earlier attempt proposed, if it is smaller."""
    text = ""
    if world.is_main:
        with contextlib.suppress(OSError, ValueError):
            text = str(int(json.loads((faults_of(run_dir) / FILE).read_text())["micro_batch"]))
    text = world.broadcast_text(text)
    if not text or int(text) >= (config.data.micro_batch or config.data.global_batch):
        return config
    if world.is_main:
        print(
            f"rollcall: data.micro_batch={text}, since memory ran out in an earlier attempt",
            flush=True,
        )
    data: Any = config.data.model_copy(update={"micro_batch": int(text)})
    return config.model_copy(update={"data": data})


def faults_of(run_dir: RunDir) -> Path:
    """Where a run keeps what is known of its faults."""
    return run_dir.path / "faults"
