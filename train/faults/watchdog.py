"""Does training still go on? A thread on every rank that notices a hang, and tells who is where.

Nothing in the loop reports to it: it looks at the number of updates and of forward passes once a
second. When neither has changed for much longer than usual, every rank writes a report beside the
run: its stacks, the place of its main thread, and how many collectives it has begun. The lowest
rank that can still do so reads them, names the ranks that the others wait for, writes the verdict,
and all end, so that whoever started them can start them again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from train.loop import Trainer
from train.run import Verdict, read_lines, write_atomic
from train.world import JOIN_TIMEOUT

TICK = 1.0
LEAST = 300.0
"""Seconds without progress that `auto` never takes for a hang."""
USUAL = 10
"""So many times the longest pause so far is not usual."""
OUTSIDE = 10
"""So many times more patience outside of steps: before the first, saving, evaluating."""
EXIT_CODE = 1
REPORTS = "hang"
# A file of ours, or a function, on the stack of the main thread, and what it does there. The first
# that is found counts; "step" places must go on, others may take long.
STEP = {
    "/train/data/": "reading data",
    "/train/stop.py": "waiting for the other ranks",
    "/train/parallel/": "computing gradients",
    "/train/update.py": "updating weights",
}
OTHER = {"/train/checkpoint/": "saving or loading a checkpoint", "/train/evaluate.py": "evaluating"}


@dataclass(frozen=True)
class Report:
    """Where a rank was when it noticed a hang.

    Attributes:
        step: updates done.
        place: what its main thread was doing.
        begun: collectives begun in each process group, by its number, and forward passes.
        seconds: since it last made progress.
    """

    rank: int
    host: str
    pid: int
    step: int
    place: str
    begun: dict[str, int]
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} was {self.place} after {self.step} steps"


def watch(trainer: Trainer) -> AbstractContextManager[Any]:
    """Watch the trainer while the context is entered, unless the configuration says not to."""
    patience = trainer.config.faults.hang_seconds
    return nullcontext() if patience is None else Watchdog(trainer, patience)


class Watchdog:
    """Watches one run while it is entered; every rank makes one together."""

    def __init__(self, trainer: Trainer, patience: float | str) -> None:
        """Prepare to watch; the start is not a step, and may take long.

        Args:
            trainer: counts the updates; forward passes of its model are progress too.
            patience: seconds without progress in a step that are a hang, or auto.
        """
        self._trainer = trainer
        self._world = trainer.world
        self._patience = patience
        token = trainer.world.broadcast_text(time.strftime("%Y%m%d-%H%M%S"))
        self._reports = trainer.run_dir.path / REPORTS / token
        self._forwards = 0
        self._longest = 0.0
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        self._hook = trainer.strategy.model.register_forward_pre_hook(self._count)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # The group's own timeout ends a rank without naming the one that it waits for: behind ours.
        behind = max(JOIN_TIMEOUT.total_seconds(), 2 * OUTSIDE * self._limit)
        _set_timeout(timedelta(seconds=behind))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._hook.remove()
        self._thread.join()

    @property
    def _limit(self) -> float:
        """Seconds without progress in a step that are a hang."""
        if isinstance(self._patience, str):
            return max(LEAST, USUAL * self._longest)
        return self._patience

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    @property
    def _progress(self) -> tuple[int, int]:
        return self._trainer.step, self._forwards

    def _watch(self) -> None:
        seen = self._progress
        began = seen
        since = last = time.monotonic()
        while not self._ended.wait(min(TICK, self._limit / 4)):
            now = time.monotonic()
            if now - last > 5 * TICK:
                since += now - last  # this process was stopped, or starved: the others may be too
            last = now
            progress = self._progress
            if progress != seen:
                if seen[0] > began[0]:  # the first step may compile, and is no measure
                    self._longest = max(self._longest, now - since)
                seen, since = progress, now
            elif now - since > self._limit:
                in_step, place = self._place()
                in_step = in_step and seen[0] > began[0]
                if in_step or now - since > OUTSIDE * self._limit:
                    report = self._report(now - since, place)
                    if self._are_all_stuck(now - since, seen):
                        self._end(report)

    def _place(self) -> tuple[bool, str]:
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        files = []
        while frame:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        for known, in_step in ((OTHER, False), (STEP, True)):
            for file in files:
                for part, place in known.items():
                    if part in file:
                        return in_step, place
        return True, "between steps"

    def _report(self, seconds: float, place: str) -> Report:
        rank, step = self._world.rank, self._trainer.step
        begun = {**_begun(), "forward passes": self._forwards}
        report = Report(rank, self._world.host, os.getpid(), step, place, begun, round(seconds, 1))
        with suppress(OSError):  # where no file can be written, the hang has to end all the same
            self._reports.mkdir(parents=True, exist_ok=True)
            with (self._reports / f"rank-{rank}.txt").open("w") as stacks:
                faulthandler.dump_traceback(stacks)
            write_atomic(self._file, json.dumps(asdict(report)) + "\n")
        return report

    def _are_all_stuck(self, seconds: float, seen: tuple[int, int]) -> bool:
        """Give the other ranks time to report, and this one a last chance to go on."""
        deadline = time.monotonic() + max(5.0, 0.1 * seconds)
        while time.monotonic() < deadline and len(self._read()) < self._world.world_size:
            time.sleep(0.1)
        if self._progress != seen:
            with suppress(OSError):
                self._file.unlink()
            return False
        return not self._ended.is_set()

    @property
    def _file(self) -> Path:
        return self._reports / f"rank-{self._world.rank}.json"

    def _end(self, mine: Report) -> None:
        reports = self._read()
        try:
            if mine.rank == min(reports, default=0):
                self._conclude(mine, reports)
            else:
                time.sleep(2)  # our end breaks connections, and the verdict shall come first
        finally:
            os._exit(EXIT_CODE)

    def _read(self) -> dict[int, Report]:
        found: list[dict[str, Any]] = []
        for path in self._reports.glob("rank-*.json"):
            with suppress(OSError):  # its rank has just taken it back
                found += read_lines(path)
        return {line["rank"]: Report(**line) for line in found}

    def _conclude(self, mine: Report, reports: dict[int, Report]) -> None:
        told = f"{mine}; no rank could write where it is"
        if reports:
            told = diagnose(reports, self._world.world_size)
        text = f"no progress for {mine.seconds:.0f} s: {told}"
        reason = f"hang after {mine.step} steps, {text}; stacks of all ranks: {self._reports}"
        print(f"rollcall: {reason}", file=sys.stderr, flush=True)
        self._trainer.run_dir.record("failed", step=mine.step, reason=reason)
        self._trainer.run_dir.conclude(Verdict("failed", mine.step, reason))


def diagnose(reports: dict[int, Report], world_size: int) -> str:
    """Which ranks the others wait for, from what the ranks reported.

    A rank that did not report is frozen or gone. Else it is those that have begun fewer collectives
    than others, and if all have begun equally many, nobody knows.
    """
    silent = sorted(set(range(world_size)) - set(reports))
    if silent:
        names = ", ".join(map(str, silent))
        one = len(silent) == 1
        return (
            f"rank{'' if one else 's'} {names} did not answer, so {'it is' if one else 'they are'} "
            "frozen, or the host is"
        )
    groups = {name for report in reports.values() for name in report.begun}
    most = {name: max(report.begun.get(name, 0) for report in reports.values()) for name in groups}
    behind = [
        report
        for report in reports.values()
        if any(report.begun.get(name, 0) < most[name] for name in report.begun)
    ]
    if behind and len(behind) < world_size:
        told = "; ".join(str(report) for report in behind)
        return f"{told}, and did not reach the collective that the others wait in"
    told = "; ".join(str(report) for report in reports.values())
    return f"all ranks have begun the same collectives: {told}"


def _begun() -> dict[str, int]:
    """Collectives begun in each process group of this rank, as torch's flight recorder counts."""
    found = {}
    for backend in ("fr", "nccl"):  # the first is gloo's (torch 2.11 and 2.15)
        dump = getattr(torch._C._distributed_c10d, f"_dump_{backend}_trace_json", None)
        status = json.loads(dump(False, False)).get("pg_status", {}) if dump else {}
        for name, group in status.items():
            found[f"{backend} {name}"] = int(group["last_enqueued_collective"])
    return found


def _set_timeout(timeout: timedelta) -> None:
    set_timeout = getattr(dist, "set_timeout", None)  # public since torch 2.15
    (set_timeout or distributed_c10d._set_pg_timeout)(timeout, dist.group.WORLD)
