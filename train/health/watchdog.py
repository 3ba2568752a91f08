"""Notice a hang, report what every rank was doing, and end the run so that it can be restarted.

A thread in each rank checks once a second for progress. After a pause much longer than usual, each
rank writes a report to the run directory. The lowest rank with a report reads them all, names the
ranks that the others wait for, and writes the verdict. Then all ranks exit.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from rollcall import activity
from rollcall.records.files import read_lines, write_atomic
from rollcall.run_dir import Verdict
from rollcall.train.dist.run import Run
from rollcall.train.dist.world import JOIN_TIMEOUT

TICK = 1.0
"""Seconds between two checks."""
MIN_SECONDS = 300.0
"""With `auto`, shorter pauses never count as a hang."""
PAUSE_FACTOR = 10
"""With `auto`, a pause longer than this multiple of the longest pause so far is a hang."""
SLOW_FACTOR = 10
"""How much longer a pause may be before the first step, while saving, and while evaluating."""
EXIT_CODE = 1
REPORTS = "hang"


@dataclass(frozen=True)
class Report:
    """The state of a rank when it noticed a hang."""

    rank: int
    host: str
    pid: int
    step: int  # updates done
    activity: str
    started: dict[str, int]  # number of collectives in each process group, and of forward passes
    seconds: float  # since the last progress

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} was {self.activity} after step {self.step}"


def watch(run: Run, model: nn.Module, step: Callable[[], int]) -> AbstractContextManager[object]:
    """Watch the run while the context is entered, unless the configuration says not to.

    Forward passes of the model are progress, and so are more updates, whose number `step` returns.
    """
    patience = run.config.faults.hang_seconds
    return nullcontext() if patience is None else Watchdog(run, model, step, patience)


class Watchdog:
    """A context manager that watches one run; all ranks must create theirs together."""

    def __init__(
        self, run: Run, model: nn.Module, step: Callable[[], int], patience: float | str
    ) -> None:
        """Take the seconds without progress in a step that are a hang, or `auto`."""
        self._run_dir, self._world = run.run_dir, run.world
        self._step, self._patience = step, patience
        token = run.world.broadcast_text(time.strftime("%Y%m%d-%H%M%S"))
        self._reports = run.run_dir.path / REPORTS / token
        self._forwards = 0
        self._longest = 0.0
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        self._hook = model.register_forward_pre_hook(self._count)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        # The process group's own timeout would end a rank without naming the one it waits for.
        later = max(JOIN_TIMEOUT.total_seconds(), 2 * SLOW_FACTOR * self._limit)
        _set_timeout(timedelta(seconds=later))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._hook.remove()
        self._thread.join()

    @property
    def _limit(self) -> float:
        if isinstance(self._patience, str):
            return max(MIN_SECONDS, PAUSE_FACTOR * self._longest)
        return self._patience

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    @property
    def _progress(self) -> tuple[int, int]:
        return self._step(), self._forwards

    def _watch(self) -> None:
        first = seen = self._progress
        since = last = time.monotonic()
        while not self._ended.wait(min(TICK, self._limit / 4)):
            now = time.monotonic()
            if now - last > 5 * TICK:
                since += now - last  # this process was stopped or starved; others may have been too
            last = now
            progress = self._progress
            if progress != seen:
                if seen[0] > first[0]:  # ignore the first step: it may include compilation
                    self._longest = max(self._longest, now - since)
                seen, since = progress, now
            elif now - since > self._limit:
                doing, may_take_long = activity.of(self._main or 0)
                is_in_step = seen[0] > first[0] and not may_take_long
                if is_in_step or now - since > SLOW_FACTOR * self._limit:
                    report = self._report(now - since, doing)
                    if self._are_all_stuck(now - since, seen):
                        self._end(report)

    def _report(self, seconds: float, doing: str) -> Report:
        rank, host, pid = self._world.rank, self._world.host, os.getpid()
        started = {**_started(), "forward passes": self._forwards}
        report = Report(rank, host, pid, self._step(), doing, started, round(seconds, 1))
        with suppress(OSError):  # even if no file can be written, the hang must end
            self._reports.mkdir(parents=True, exist_ok=True)
            with (self._reports / f"rank-{rank}.txt").open("w") as stacks:
                faulthandler.dump_traceback(stacks)
            write_atomic(self._file, json.dumps(asdict(report)) + "\n")
        return report

    def _are_all_stuck(self, seconds: float, seen: tuple[int, int]) -> bool:
        """Wait for the other ranks' reports; withdraw this one's if it makes progress meanwhile."""
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
                time.sleep(2)  # let the verdict be written before this exit breaks connections
        finally:
            os._exit(EXIT_CODE)

    def _read(self) -> dict[int, Report]:
        found: list[dict[str, Any]] = []
        for path in self._reports.glob("rank-*.json"):
            with suppress(OSError):  # its rank has just withdrawn it
                found += read_lines(path)
        return {line["rank"]: Report(**line) for line in found}

    def _conclude(self, mine: Report, reports: dict[int, Report]) -> None:
        unknown = f"{mine}; no rank could write a report"
        found = diagnose(reports, self._world.world_size) if reports else unknown
        text = f"no progress for {mine.seconds:.0f} s: {found}"
        reason = f"hang after step {mine.step}, {text}; stacks of all ranks: {self._reports}"
        print(f"rollcall: {reason}", file=sys.stderr, flush=True)
        self._run_dir.record("failed", step=mine.step, reason=reason)
        self._run_dir.conclude(Verdict("failed", mine.step, reason))


def diagnose(reports: dict[int, Report], world_size: int) -> str:
    """Name the ranks that the others wait for.

    A rank without a report is frozen or dead. If all ranks reported, the others wait for the ranks
    with fewer collectives. If all have started the same number, list all ranks.
    """
    silent = sorted(set(range(world_size)) - set(reports))
    names = ", ".join(map(str, silent))
    if len(silent) == 1:
        return f"rank {names} wrote no report: its process or its host is frozen"
    if silent:
        return f"ranks {names} wrote no reports: their processes or their hosts are frozen"
    most: Counter[str] = Counter()
    for report in reports.values():
        most |= Counter(report.started)
    behind = [
        report
        for report in reports.values()
        if any(count < most[name] for name, count in report.started.items())
    ]
    if behind and len(behind) < world_size:
        names = "; ".join(map(str, behind))
        return f"{names} and did not reach the collective that the other ranks wait in"
    names = "; ".join(map(str, reports.values()))
    return f"all ranks have started the same collectives: {names}"


def _started() -> dict[str, int]:
    """Count the collectives started in each process group, from torch's flight recorder."""
    found = {}
    for backend in ("fr", "nccl"):  # "fr" is gloo's (torch 2.11 and 2.15)
        dump = getattr(torch._C._distributed_c10d, f"_dump_{backend}_trace_json", None)
        status = json.loads(dump(False, False)).get("pg_status", {}) if dump else {}
        for name, group in status.items():
            found[f"{backend} {name}"] = int(group["last_enqueued_collective"])
    return found


def _set_timeout(timeout: timedelta) -> None:
    set_timeout = getattr(dist, "set_timeout", None)  # public since torch 2.15
    (set_timeout or distributed_c10d._set_pg_timeout)(timeout, dist.group.WORLD)
