"""Handle running out of memory: recognize it, record it, propose a smaller micro-batch."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_object, write_atomic
from rollcall.train import torch_private
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World

# Messages of the CPU allocators: https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp
HOST_MESSAGES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
FILE = "micro-batch.json"
GROUPS = "/sys/fs/cgroup"


def is_exhausted(error: BaseException) -> bool:
    """Return True if this exception means that a GPU or the host ran out of memory."""
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
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def snapshot(run: Run, step: int) -> None:
    """Write a snapshot of the GPU's allocator."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(OSError):  # the disk may be full as well
            run.run_dir.faults.mkdir(exist_ok=True)
            path = run.run_dir.faults / f"memory-step-{step:08d}-rank-{run.world.rank}.pickle"
            torch_private.dump_memory(path)


def rejoin(run: Run, finish_with_nan: Callable[[], bool], problem: str, micro_batch: int) -> None:
    """Complete a step that ran out of memory with NaN; raise MemoryError if that fails."""
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    if not finish_with_nan():
        give_up(run, problem, micro_batch)


def give_up(run: Run, problem: str, micro_batch: int) -> NoReturn:
    """Raise MemoryError; the next attempt begins with this micro-batch."""
    with contextlib.suppress(OSError):  # the disk is full
        run.run_dir.create()  # `micro_batch.search` comes before it
        propose(run.run_dir, micro_batch)
    raise MemoryError(
        f"rank {run.world.rank} on {run.world.host} ran out of memory: {problem}. Start the same "
        f"command again to continue with data.micro_batch={micro_batch}"
    )


def propose(run_dir: RunDir, micro_batch: int, is_fastest: bool = False) -> None:
    """Record a micro-batch for the next attempt, or the one of `data.micro_batch=auto`."""
    run_dir.faults.mkdir(exist_ok=True)
    found = {"micro_batch": micro_batch, "is_fastest": is_fastest}
    write_atomic(run_dir.faults / FILE, json.dumps(found) + "\n")


def with_proposal(run: Run) -> Run:
    """Return the run with the micro-batch that an earlier attempt proposed, or found fastest."""
    asked, batch = run.config.data.micro_batch, run.config.data.global_batch
    found = run.world.broadcast(run.world.is_main and read_object(run.run_dir.faults / FILE))
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
