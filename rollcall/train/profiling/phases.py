"""Gather phases and memory of all ranks at intervals, record them, and look for late ranks."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollcall.records.phases import Phases
from rollcall.records.profile import ProfileRequest
from rollcall.system.files import Journal
from rollcall.train.profiling.verdict import LateRanks, Window, limits
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.clock import clock
from rollcall.train.ranks.run import Run

EXCHANGE_EVERY = 0.25
"""Seconds between two exchanges of the phases of up to LARGE_WORLD ranks."""
LINE_EVERY = 1.0
"""Seconds between two lines of phases.jsonl of up to LARGE_WORLD ranks, at first."""
LARGE_WORLD = 32
"""Ranks above which exchanges and lines become rarer in proportion, because they become longer."""
AGE_SHARE = 1 / 500
"""The share of the attempt's age between two later lines, whose number grows logarithmically."""
COLUMNS = 17
"""Numbers of a rank: 6 phases in seconds, 6 counts of late steps, 3 sizes in bytes, steps, and
steps to profile."""
PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Table:
    """COLUMNS numbers of each rank, or none."""

    numbers: torch.Tensor | list[float]


class PhaseTimes:
    """The member that measures each rank's time and memory; each counts its late steps itself."""

    def __init__(self, run: Run, plan: Callable[[int, int], None]) -> None:
        """Learn the names of all ranks; `plan` gets the first step and the end of a profile."""
        world = run.world
        self._run, self._plan = run, plan
        self._is_on_gpu = world.device.type == "cuda"
        device = f"{world.host}, gpu {world.device.index}" if self._is_on_gpu else world.host
        self._devices = world.gather_text(device)
        self._names = [f"rank {rank} ({device})" for rank, device in enumerate(self._devices)]
        self._late = LateRanks(self._names)
        self._journal = Journal(run.run_dir.path / Phases.FILE)
        self._is_due = False
        self._passed = 0.0  # seconds since the newest exchange, the same on all ranks
        self._age = self._written = 0.0
        self._scale = max(1.0, world.world_size / LARGE_WORLD)
        self._lines: list[tuple[int, np.ndarray, np.ndarray]] = []  # not written yet
        self._newest = sys.maxsize  # the newest step

    def report(self) -> Table:
        """Return this rank's row of the table of all ranks if it is due; otherwise nothing."""
        world = self._run.world
        if not (self._is_due or self._run.progress.is_over):
            return Table(torch.zeros(0))
        self._is_due, self._passed = False, 0.0
        steps, seconds, late = clock.take()
        table = torch.zeros(world.world_size, COLUMNS, dtype=torch.float64)
        row = [*(phase / max(1, steps) for phase in seconds), *late, *self._sizes(), steps]
        table[world.rank, :-1] = torch.tensor(row, dtype=torch.float64)
        if world.is_main and (request := ProfileRequest.read(self._run.run_dir.path)):
            with suppress(OSError):  # without the removal it would be read again
                ProfileRequest.path_in(self._run.run_dir.path).unlink()
                asked = [rank for rank in request.ranks if 0 <= rank < world.world_size]
                table[asked, -1] = float(request.steps)
        return Table(table.flatten())

    def settle(self, step: Step, agreed: Table) -> Action:
        """Read the table if it was sent; decide whether it is due, the same on all ranks."""
        passed = step.seconds * step.steps
        self._passed += passed
        self._age += passed
        self._is_due = self._passed >= EXCHANGE_EVERY * self._scale
        if not step.is_skipped:
            if step.number <= self._newest and self._run.world.is_main:  # resumed or rolled back
                self._lines.clear()
                Phases.forget_after(self._run.run_dir.path, step.number - 1)
            self._newest = step.number
        if len(agreed.numbers):
            table = np.array(agreed.numbers).reshape(-1, COLUMNS)
            steps = table[:, 15]
            if steps.all():  # each rank has ended a step
                window = Window(step.number, round(steps.mean()), table[:, :6], table[:, 6:12])
                self._read(window, table[:, 12:15])
            if asked := int(table[self._run.world.rank, -1]):
                self._plan(step.number + 2, step.number + 2 + asked)
        return Action.CONTINUE

    def fields(self) -> dict[str, Any]:
        """Return fields for a line of metrics.jsonl, on rank 0."""
        if (slowest := self._late.slowest) is None:
            return {}
        return {"slowest_rank": slowest[0], "slowest_ratio": round(slowest[1], 2)}

    def _read(self, window: Window, memory: np.ndarray) -> None:
        clock.limits = limits(window.phases)[self._run.world.rank].tolist()
        if not self._run.world.is_main:
            return
        if late := self._late.add(window):
            self._run.say(f"rollcall: {late['text']}")
            host = self._devices[late["rank"]].partition(",")[0]
            self._run.record("straggler", step=window.step, host=host, **late)
        self._lines.append((window.steps, window.phases, memory))
        spacing = max(LINE_EVERY, self._age * AGE_SHARE) * self._scale
        if not self._written or self._age - self._written >= spacing or self._run.progress.is_over:
            self._written = self._age
            self._write(window.step)

    def _write(self, step: int) -> None:
        counts, times, sizes = zip(*self._lines, strict=True)
        phases = np.average(times, axis=0, weights=counts)
        memory = np.max(sizes, axis=0).astype(int).T.tolist()
        self._lines.clear()
        seconds = float(phases.sum(1).mean())
        # The steps of two ranks do not end at the same time, which matters to short lines.
        phases *= seconds / phases.sum(1, keepdims=True)
        line = Phases(
            step=step,
            steps=sum(counts),
            time=time.time(),
            seconds=round(seconds, 7),
            phases=dict(zip(Phases.PHASES, phases.T.round(7).tolist(), strict=True)),
            memory=memory[0],
            reserved=memory[1] if self._is_on_gpu else None,
            host=memory[2],
        )
        self._journal.append(line.as_dict())

    def _sizes(self) -> tuple[float, float, float]:
        """Return the bytes of the peak, of PyTorch's reserved peak, and of the resident memory."""
        resident = float(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        if not self._is_on_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, 0.0, resident
        device = self._run.world.device
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return *peaks, resident
