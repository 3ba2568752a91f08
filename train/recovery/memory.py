"""Handle running out of memory: recognize it, record it, propose a smaller micro-batch."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from rollcall.records.files import read_object, write_atomic
from rollcall.run_dir import RunDir
from rollcall.train.dist.run import Run
from rollcall.train.dist.world import World

# Messages of the CPU allocators: https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp
HOST_MESSAGES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
FILE = "micro-batch.json"
GROUPS = "/sys/fs/cgroup"


def is_exhausted(error: Exception) -> bool:
    """Return whether this exception means that a GPU or the host ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in HOST_MESSAGES)


def free(world: World) -> float:
    """Return the bytes that this rank may still take: of its GPU, or its share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.mem_get_info(world.device)[0])
    found = psutil.virtual_memory().available
    group = Path(GROUPS, _text(Path("/proc/self/cgroup")).rpartition("::/")[2])
    for folder in (group, *group.parents):  # a job's limit, as Slurm sets it
        limit = _text(folder / "memory.max")
        if limit.isdecimal():
            counts = (line.split() for line in _text(folder / "memory.stat").splitlines())
            # Without the cache of files, which the kernel drops when the memory is needed.
            used = sum(int(count) for name, count in counts if name in ("anon", "shmem"))
            found = min(found, max(0, int(limit) - used))
    return found / world.place.local_world_size


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def snapshot(run: Run, step: int) -> None:
    """Write a snapshot of the GPU's allocator, for https://pytorch.org/memory_viz."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError):  # the disk may be full as well
            directory = faults_of(run.run_dir)
            directory.mkdir(exist_ok=True)
            path = directory / f"memory-step-{step:08d}-rank-{run.world.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def propose(run_dir: RunDir, micro_batch: int, is_fastest: bool = False) -> None:
    """Record a micro-batch for the next attempt, or the one of `data.micro_batch=auto`."""
    directory = faults_of(run_dir)
    directory.mkdir(exist_ok=True)
    found = {"micro_batch": micro_batch, "is_fastest": is_fastest}
    write_atomic(directory / FILE, json.dumps(found) + "\n")


def with_proposal(run: Run) -> Run:
    """Return the run with the micro-batch that an earlier attempt proposed, if it is smaller.

    With `data.micro_batch=auto`, also the one that an earlier attempt found to be the fastest.
    """
    asked, batch = run.config.data.micro_batch, run.config.data.global_batch
    found = run.world.broadcast(run.world.is_main and read_object(faults_of(run.run_dir) / FILE))
    size, is_fastest = ((found or {}).get(name) for name in ("micro_batch", "is_fastest"))
    most = batch + 1 if asked == "auto" else asked or batch
    if type(size) is not int or not 0 < size < most or (is_fastest and asked != "auto"):
        return run
    did = "found it to be the fastest" if is_fastest else "ran out of memory"
    run.say(f"rollcall: data.micro_batch={size}, because an earlier attempt {did}")
    return with_micro_batch(run, size)


def with_micro_batch(run: Run, size: int | None) -> Run:
    """Return the run with another `data.micro_batch`."""
    data: Any = run.config.data.model_copy(update={"micro_batch": size})
    return replace(run, config=run.config.model_copy(update={"data": data}))


def faults_of(run_dir: RunDir) -> Path:
    """Return the directory in which a run keeps what it knows about its faults."""
    return run_dir.path / "faults"
