"""Gather the phases and the memory of all ranks now and then, write them down, and judge them."""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollcall.records.files import Journal
from rollcall.records.phases import Phases
from rollcall.records.profile import ProfileRequest
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.clock import clock
from rollcall.train.dist.run import Run
from rollcall.train.profiling.verdict import GrowingMemory, LateRanks, Window, limits

WINDOW = 0.25
"""Seconds between two exchanges of the phases of up to RANKS ranks."""
LINE = 1.0
"""Seconds between two lines of phases.jsonl of up to RANKS ranks, at first."""
RANKS = 32
"""Ranks above which exchanges and lines become rarer in proportion, because they become longer."""
AGES = 500
"""Later a line takes 1/AGES of the attempt's age, so their number grows with its logarithm."""
COLUMNS = 17
"""Of a rank: 6 phases in seconds, 6 counts of late steps, 3 sizes in bytes, steps, and steps to
profile."""
LONGEST_NAME = 64
"""Bytes of a host's name that ranks exchange."""
PAGE = resource.getpagesize()


class PhaseTimes:
    """The member of the step that says where each rank spends its time and how much it holds.

    The numbers of all ranks travel with few exchanges, after which each rank knows how long the
    others take: so it can count by itself in how many steps it is late.
    """

    def __init__(
        self, run: Run, is_last: Callable[[], bool], plan: Callable[[int, int], None]
    ) -> None:
        """Learn the names of all ranks, which make this call together.

        `is_last` returns whether the newest step is the last one of the run. `plan` is called on
        the ranks that a person wants profiled, with the first step and the end.
        """
        world = run.world
        self._run, self._is_last, self._plan = run, is_last, plan
        self._is_on_gpu = world.device.type == "cuda"
        place = f"{world.host}, gpu {world.device.index}" if self._is_on_gpu else world.host
        name = place.encode()[:LONGEST_NAME].ljust(LONGEST_NAME)
        found = world.gather(torch.tensor(list(name), dtype=torch.uint8)).tolist()
        self._places = [bytes(text).decode(errors="replace").strip() for text in found]
        self._names = [f"rank {rank} ({place})" for rank, place in enumerate(self._places)]
        self._late = LateRanks(self._names)
        self._memory = [GrowingMemory(self._names, "memory")]
        if self._is_on_gpu:
            self._memory.append(GrowingMemory(self._names, "GPU memory"))
        self._journal = Journal(run.run_dir.path / Phases.FILE)
        self._is_due = False
        self._passed = 0.0  # seconds since the newest exchange, the same on all ranks
        self._age = self._written = 0.0
        self._scale = max(1.0, world.world_size / RANKS)
        self._lines: list[tuple[int, np.ndarray, np.ndarray]] = []  # not written yet
        self._newest = sys.maxsize  # the newest step

    def report(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's row of the table of all ranks if it is due; else nothing."""
        world = self._run.world
        if not (self._is_due or self._is_last()):
            return {"phases": torch.zeros(0)}
        self._is_due, self._passed = False, 0.0
        steps, seconds, late = clock.take()
        table = torch.zeros(world.world_size, COLUMNS, dtype=torch.float64)
        row = [*(one / max(1, steps) for one in seconds), *late, *self._sizes(), steps]
        table[world.rank, :-1] = torch.tensor(row, dtype=torch.float64)
        if world.is_main and (request := ProfileRequest.read(self._run.run_dir.path)):
            with suppress(OSError):  # else it would be read again
                ProfileRequest.place(self._run.run_dir.path).unlink()
                asked = [rank for rank in request.ranks if 0 <= rank < world.world_size]
                table[asked, -1] = float(request.steps)
        return {"phases": table.flatten()}

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Read the table if it was sent; decide whether it is due, the same on all ranks."""
        passed = agreed["seconds"] * agreed["steps"]
        self._passed += passed
        self._age += passed
        self._is_due = self._passed >= WINDOW * self._scale
        if not agreed["skipped"]:
            if step <= self._newest and self._run.world.is_main:  # it resumed or was rolled back
                self._lines.clear()
                Phases.forget_after(self._run.run_dir.path, step - 1)
            self._newest = step
        if agreed["phases"]:
            table = np.array(agreed["phases"]).reshape(-1, COLUMNS)
            steps = table[:, 15]
            if steps.all():  # each rank has ended a step
                window = Window(step, round(steps.mean()), table[:, :6], table[:, 6:12])
                self._read(window, table[:, 12:15])
            if asked := int(table[self._run.world.rank, -1]):
                self._plan(step + 2, step + 2 + asked)
        return Action.CONTINUE

    def fields(self) -> dict[str, Any]:
        """Return fields for a line of metrics.jsonl, on rank 0."""
        found = self._late.slowest
        return {"slowest_rank": found[0], "slowest_ratio": round(found[1], 2)} if found else {}

    def _read(self, window: Window, memory: np.ndarray) -> None:
        rank = self._run.world.rank
        clock.limits = limits(window.phases)[rank].tolist()
        if not self._run.world.is_main:
            return
        self._tell("straggler", window.step, self._late.add(window))
        for growing, sizes in zip(self._memory, (memory[:, 2], memory[:, 0]), strict=False):
            self._tell("memory_grows", window.step, growing.add(window.step, sizes))
        self._lines.append((window.steps, window.phases, memory))
        spacing = max(LINE * self._scale, self._age / AGES * self._scale)
        if not self._written or self._age - self._written >= spacing or self._is_last():
            self._written = self._age
            self._write(window.step)

    def _tell(self, event: str, step: int, found: dict[str, Any] | None) -> None:
        if found:
            self._run.say(f"rollcall: {found['text']}")
            host = self._places[found["rank"]].partition(",")[0]
            self._run.record(event, step=step, host=host, **found)

    def _write(self, step: int) -> None:
        counts, times, sizes = zip(*self._lines, strict=True)
        phases = np.average(times, axis=0, weights=counts)
        memory = np.max(sizes, axis=0).astype(int).T.tolist()
        self._lines.clear()
        seconds = float(phases.sum(1).mean())
        # The steps of two ranks do not end at the same time, which matters to short lines.
        phases *= seconds / phases.sum(1, keepdims=True)
        table = {
            name: [round(one, 7) for one in phases[:, place].tolist()]
            for place, name in enumerate(Phases.PHASES)
        }
        line = Phases(
            step=step,
            steps=sum(counts),
            time=time.time(),
            seconds=round(seconds, 7),
            phases=table,
            memory=memory[0],
            reserved=memory[1] if self._is_on_gpu else None,
            host=memory[2],
        )
        self._journal.append(line.as_dict())

    def _sizes(self) -> tuple[float, float, float]:
        """Return bytes: the peak, the peak that PyTorch reserved, and what this process holds."""
        resident = float(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        if not self._is_on_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, 0.0, resident
        device = self._run.world.device
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return *peaks, resident
