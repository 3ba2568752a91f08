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
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from rollcall.records.run_dir import Verdict
from rollcall.system.files import read_lines, write_atomic
from rollcall.train import torch_private
from rollcall.train.ranks import activity
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import JOIN_TIMEOUT

CHECK_EVERY = 1.0
"""Seconds between two checks."""
MIN_SECONDS = 300.0
"""With `auto`, shorter pauses never count as a hang."""
PAUSE_FACTOR = 10
"""With `auto`, a pause longer than this multiple of the longest pause so far is a hang."""
SLOW_FACTOR = 10
"""Pauses may be this many times longer before the first step, and while saving or evaluating."""
FOLDER = "hang"
"""The folder of the reports in the run directory."""


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


class Watchdog:
    """A context manager that watches one run; all ranks must create theirs together.

    Forward passes of the model are progress, and so are more updates.
    """

    def __init__(self, run: Run, model: nn.Module, patience: float | str) -> None:
        """Watch a run; `patience` is the seconds without progress that are a hang, or `auto`."""
        self._run_dir, self._world = run.run_dir, run.world
        self._run_progress, self._patience = run.progress, patience
        token = run.world.broadcast_text(time.strftime("%Y%m%d-%H%M%S"))
        self._reports = run.run_dir.path / FOLDER / token
        self._forwards = 0
        self._longest = 0.0
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        self._hook = model.register_forward_pre_hook(self._count)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        # The process group's timeout would end a rank without naming the rank it waits for.
        timeout = max(JOIN_TIMEOUT.total_seconds(), 2 * SLOW_FACTOR * self._limit)
        torch_private.set_timeout(timedelta(seconds=timeout))
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
        return self._run_progress.step, self._forwards

    def _watch(self) -> None:
        first = seen = self._progress
        since = last = time.monotonic()
        while not self._ended.wait(min(CHECK_EVERY, self._limit / 4)):
            now = time.monotonic()
            if now - last > 5 * CHECK_EVERY:
                since += now - last  # this process was stopped or starved, like others perhaps
            last = now
            progress = self._progress
            if progress != seen:
                if seen[0] > first[0]:  # ignore the first step: it may include compilation
                    self._longest = max(self._longest, now - since)
                seen, since = progress, now
            elif now - since > self._limit:
                doing, may_take_long = activity.of(self._main or 0)
                is_in_step = seen[0] > first[0] and not may_take_long
                # A rank that waits while it saves would else be called frozen by the others.
                if is_in_step or now - since > SLOW_FACTOR * self._limit or self._read():
                    report = self._report(now - since, doing)
                    if self._are_all_stuck(now - since, seen):
                        self._end(report)

    def _report(self, seconds: float, doing: str) -> Report:
        rank, host, pid = self._world.rank, self._world.host, os.getpid()
        started = {**torch_private.collectives_started(), "forward passes": self._forwards}
        report = Report(rank, host, pid, self._run_progress.step, doing, started, round(seconds, 1))
        with suppress(OSError):  # the hang must end even if no file can be written
            self._reports.mkdir(parents=True, exist_ok=True)
            with (self._reports / f"rank-{rank}.txt").open("w") as stacks:
                faulthandler.dump_traceback(stacks)
            write_atomic(self._file, json.dumps(asdict(report)) + "\n")
        return report

    def _are_all_stuck(self, seconds: float, seen: tuple[int, int]) -> bool:
        """Wait for the other ranks' reports; withdraw this rank's if it makes progress again."""
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
            os._exit(1)

    def _read(self) -> dict[int, Report]:
        lines: list[dict[str, Any]] = []
        for path in self._reports.glob("rank-*.json"):
            with suppress(OSError):  # its rank has just withdrawn it
                lines += read_lines(path)
        return {line["rank"]: Report(**line) for line in lines}

    def _conclude(self, mine: Report, reports: dict[int, Report]) -> None:
        diagnosis = f"{mine}; no rank could write a report"
        if reports:
            diagnosis = diagnose(reports, self._world.world_size)
        reason = (
            f"hang after step {mine.step}, no progress for {mine.seconds:.0f} s: {diagnosis}; "
            f"stacks of all ranks: {self._reports}"
        )
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
