"""Which rank do the others wait for? The time that each computes by itself, which collectives hide.

Ranks that add up gradients in every step take equally long for it, the slow one included. So each
takes the time from the beginning of its forward pass to its last gradient, before it waits for any
other. Under strategies that wait for other ranks in between all times are alike, and none is named.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from train.world import World

WINDOW = 20
"""Steps whose median counts."""
SLOW = 1.5
"""A rank is slow that takes so many times as long as the others do."""
IN_A_ROW = 3
"""Windows in which it must be, so that it is not only disturbed."""
LONGEST_NAME = 64


class Stopwatch:
    """Takes the time of a rank's own forward and backward passes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Watch the model: the order of its gradients in the first backward pass tells the last."""
        self._on_gpu = device.type == "cuda"
        self._passes: deque[tuple[Any, Any]] = deque()
        self._begun: Any = None
        self._last: nn.Parameter | None = None
        model.register_forward_pre_hook(self._begin)
        self._hooks = [
            (weight, weight.register_post_accumulate_grad_hook(self._see))  # type: ignore[no-untyped-call]
            for weight in model.parameters()
            if weight.requires_grad
        ]

    def take(self) -> float:
        """Seconds of the passes since the last call; on a GPU those that have ended there."""
        seconds = 0.0
        while self._passes and (not self._on_gpu or self._passes[0][1].query()):
            begin, end = self._passes.popleft()
            seconds += begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._last is not None and len(self._hooks) > 1:
            for weight, hook in self._hooks:
                if weight is not self._last:
                    hook.remove()
            self._hooks = [pair for pair in self._hooks if pair[0] is self._last]
        self._begun = self._now()

    def _see(self, weight: nn.Parameter) -> None:
        if len(self._hooks) > 1:
            self._last = weight
        elif self._begun is not None:
            self._passes.append((self._begun, self._now()))
            self._begun = None


class Stragglers:
    """Compares the ranks, on rank 0."""

    def __init__(self, world: World) -> None:
        """Learn the hosts of all ranks, which call this together."""
        name = world.host.encode()[:LONGEST_NAME].ljust(LONGEST_NAME)
        found = [torch.empty(LONGEST_NAME, dtype=torch.uint8) for _ in range(world.world_size)]
        dist.all_gather(found, torch.tensor(list(name), dtype=torch.uint8))
        self._hosts = [bytes(text.tolist()).decode().strip() for text in found]
        self._times: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self._row: tuple[int, int] = (0, 0)  # a rank, and windows in which it was slow

    def step(self, times: Sequence[float]) -> None:
        """Count a step: the seconds of every rank."""
        self._times.append(times)
        self._steps += 1

    def slowest(self) -> tuple[int, float] | None:
        """The rank that took longest in the last steps, and how many times as long as the others.

        None while that is not known.
        """
        if len(self._times) < WINDOW or len(self._hosts) == 1:
            return None
        medians = [statistics.median(seconds) for seconds in zip(*self._times, strict=True)]
        rank = max(range(len(medians)), key=medians.__getitem__)
        usual = statistics.median(medians[:rank] + medians[rank + 1 :])
        return (rank, medians[rank] / usual) if usual else None

    def fields(self) -> dict[str, Any]:
        """What a line of the metrics says of it."""
        rank, times = self.slowest() or (0, 0.0)
        return {"slowest_rank": rank, "slowest_times": round(times, 2)} if times else {}

    def news(self) -> dict[str, Any] | None:
        """The rank that has become slow with this step, where it runs, and by how much."""
        if self._steps % WINDOW:
            return None
        rank, ratio = self.slowest() or (0, 0.0)
        before, row = self._row
        self._row = (rank, row + 1 if rank == before else 1) if ratio >= SLOW else (rank, 0)
        if self._row[1] != IN_A_ROW:
            return None
        return {"rank": rank, "host": self._hosts[rank], "times": round(ratio, 2)}
