"""Find how many samples at once fit into memory, and how many are fastest: `data.micro_batch=auto`.

Sizes grow by doubling, then by halves of what is left. A size is tried only if the line through the
last two peaks says that it fits, so memory seldom runs out on the way.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rollcall.train.data.source import Batch
from rollcall.train.ranks.device import synchronize
from rollcall.train.ranks.world import World
from rollcall.train.recovery import memory

MARGIN = 0.1
"""Share of the memory that stays free: longer samples or fragments may need it."""
CLOSE = 0.05
"""Of sizes whose speed differs by less than this share, the largest counts as fastest."""


@dataclass(frozen=True)
class Trial:
    """The memory and time of a micro-batch, on the rank that needed most."""

    size: int  # samples
    peak: float  # bytes in use; infinite if memory ran out
    seconds: float  # of a forward and backward pass

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.size / self.seconds


def fastest(trials: Sequence[Trial], limit: float) -> Trial | None:
    """Return the fastest of the trials that fit into a limit, in bytes of a rank."""
    fitting = [trial for trial in trials if trial.peak <= limit]
    best = max((trial.rate for trial in fitting), default=0.0)
    close = [trial for trial in fitting if trial.rate >= (1 - CLOSE) * best]
    return max(close, key=lambda trial: trial.size, default=None)


def search(world: World, fits_memory: Callable[[Batch], bool], batch: Batch) -> Trial | None:
    """Try passes over more and more rows; `fits_memory` makes one and says whether it fit."""

    def trial(size: int) -> Trial:
        part = batch.map(lambda tensor: tensor[:size])
        _forget_peak(world.device)
        times = []
        for _ in range(2):  # the first pass of a size may be slower
            began = time.perf_counter()
            fits = fits_memory(part)
            synchronize(world.device)
            times.append(time.perf_counter() - began)
        return Trial(size, *_most(world, _peak(world.device) if fits else math.inf, min(times)))

    (least,) = _most(world, -_usable(world) * (1 - MARGIN))
    return fastest(trials(trial, len(batch.weights), -least), -least)


def trials(trial: Callable[[int], Trial], most: int, limit: float) -> list[Trial]:
    """Return the sizes tried on the way to the largest fitting one up to `most`, or nearly that."""
    found: list[Trial] = []
    fits, fails, size = 0, most + 1, min(2, most)  # BatchNorm does not train on one sample
    while fails - fits > max(1, fits // 16):
        is_small = _expected(found, size) <= limit
        if is_small:
            found.append(trial(size))
            is_small = found[-1].peak <= limit
        fits, fails = (size, fails) if is_small else (fits, size)
        size = min(2 * fits, most) if fails > most else (fits + fails) // 2
    return found


def _expected(found: Sequence[Trial], size: int) -> float:
    """Return the peak of a size, by the line through the two largest that did not run out."""
    known = sorted((one for one in found if one.peak < math.inf), key=lambda one: one.size)[-2:]
    if len(known) < 2:
        return 0.0
    low, high = known
    return high.peak + (size - high.size) * (high.peak - low.peak) / (high.size - low.size)


def _most(world: World, *mine: float) -> list[float]:
    return list(world.gather(torch.tensor(mine, dtype=torch.float64)).amax(0).tolist())


def _usable(world: World) -> float:
    """Return the bytes that this rank may use: what it has, and its share of what is free."""
    on_gpu = world.device.type == "cuda"
    own = torch.cuda.memory_reserved(world.device) if on_gpu else psutil.Process().memory_info().rss
    return own + memory.free(world)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # without it, no peak is lower than one before
            Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
