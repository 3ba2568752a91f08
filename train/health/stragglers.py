"""Find the rank that the others wait for, by the time that each rank computes alone.

Each rank measures the time from the start of its forward pass to its last gradient, before it waits
for others. If a strategy exchanges data inside the forward pass, no straggler is found.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rollcall.train.dist.agreement import Action, one_slot
from rollcall.train.dist.run import Run

WINDOW = 20
"""Exchanges whose median time is compared."""
SLOW = 1.5
"""A rank is a straggler if it takes at least this multiple of the others' median."""
IN_A_ROW = 3
"""Windows in a row after which a straggler is reported: a short disturbance is not one."""
LONGEST_NAME = 64
"""Bytes of a host's name that ranks exchange."""


class Stragglers:
    """The member of the step that compares how long each rank computes."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        """Learn the hosts of all ranks, which make this call together."""
        world = run.world
        self._run = run
        self._stopwatch = Stopwatch(model, world.device) if world.world_size > 1 else None
        name = world.host.encode()[:LONGEST_NAME].ljust(LONGEST_NAME)
        found = world.gather(torch.tensor(list(name), dtype=torch.uint8)).tolist()
        self._hosts = [bytes(text).decode().strip() for text in found]
        self._times: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self._row: tuple[int, int] = (0, 0)  # a rank, and the windows in which it was slow

    def report(self) -> Mapping[str, torch.Tensor]:
        """Return the seconds that this rank computed since the last report."""
        world = self._run.world
        seconds = self._stopwatch.take() if self._stopwatch else 0.0
        return {"compute_seconds": one_slot(seconds, world.rank, world.world_size)}

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Report a rank that has become a straggler with this step."""
        if not agreed["skipped"] and self._run.world.is_main:
            self._times.append(agreed["compute_seconds"])
            self._steps += 1
            slow = self._news()
            if slow:
                text = "rank {rank} on {host} takes {times} times as long as the others"
                self._run.tell("straggler", text.format(**slow), step=step, **slow)
        return Action.CONTINUE

    def fields(self) -> dict[str, Any]:
        """Return fields for a line of metrics.jsonl, on rank 0."""
        rank, times = self._slowest() or (0, 0.0)
        return {"slowest_rank": rank, "slowest_ratio": round(times, 2)} if times else {}

    def _slowest(self) -> tuple[int, float] | None:
        """Return the slowest rank, and its time as a multiple of the others' median, if known."""
        if len(self._times) < WINDOW or len(self._hosts) == 1:
            return None
        medians = np.median(np.array(self._times), axis=0)
        rank = int(medians.argmax())
        usual = float(np.median(np.delete(medians, rank)))
        return (rank, float(medians[rank]) / usual) if usual else None

    def _news(self) -> dict[str, Any] | None:
        """Return a new straggler: its rank, its host, and its time as a multiple of the others'."""
        if self._steps % WINDOW:
            return None
        rank, ratio = self._slowest() or (0, 0.0)
        before, row = self._row
        self._row = (rank, row + 1 if rank == before else 1) if ratio >= SLOW else (rank, 0)
        if self._row[1] != IN_A_ROW:
            return None
        return {"rank": rank, "host": self._hosts[rank], "times": round(ratio, 2)}


class Stopwatch:
    """Measures the time of a rank's own forward and backward passes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Watch the model; the first backward pass shows which gradient comes last."""
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
        """Return the seconds of all passes since the last call; on a GPU, only of ended ones."""
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
