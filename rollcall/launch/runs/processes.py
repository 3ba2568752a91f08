"""The processes on this machine that started a run's local jobs, from one look at /proc."""

import contextlib
import math
import os
import socket
from functools import cached_property
from pathlib import Path

from rollcall.launch.runs import find
from rollcall.records.attempt import NodeState
from rollcall.records.run_dir import RunDir
from rollcall.system.process import stat

CLOCK = 60.0
"""Seconds by which the clock may have been set since."""


class Processes:
    """The processes of this machine, read once, when they are needed."""

    def of(self, run: RunDir) -> list[int]:
        """Return the processes that started a run's nodes or, if killed, its supervisors."""
        controllers, job = self._controllers, run.job.resolve()
        if job in controllers:
            return controllers[job]
        of_tasks = controllers.get(job.parent, [])  # or of another run, in this one's directory
        return of_tasks if of_tasks and find.is_sweep(run) else self.supervisors(run)

    def begin(self) -> bool:
        """Read them; return False if they were read before."""
        return "_words" not in vars(self) and bool(self._words)

    def stopped(self, run: RunDir) -> list[int]:
        """Return the processes of a run that somebody has stopped, as with SIGSTOP."""
        pids = {*self.of(run), *self.supervisors(run)}
        return sorted(pid for pid in pids if stat(pid)[:1] == ["T"])

    def supervisors(self, run: RunDir) -> list[int]:
        """Return the supervisors of the newest attempt that still run, as their records say."""
        if (newest := find.newest_attempt(run)) is None:
            return []
        parts = NodeState.read_all(run.path, attempt=newest.number).values()
        host = socket.gethostname()
        here = {part.supervisor: part.started for part in parts if part.host == host}
        ours = [pid for pid in here if "supervise" in self._words.get(str(pid), ())]
        return sorted(pid for pid in ours if _began(pid) < here[pid] + CLOCK)

    @cached_property
    def _words(self) -> dict[str, list[str]]:
        names = os.listdir("/proc")  # noqa: PTH208 (names, not paths)
        return {name: _words_of(name) for name in names if name.isdecimal()}

    @cached_property
    def _controllers(self) -> dict[Path, list[int]]:
        """The controllers of submitit, by their last word, job/, and by what has the run in it."""
        table: dict[Path, list[int]] = {}
        for pid, words in self._words.items():
            if "submitit.local._local" in words:
                job = Path(words[-1]).resolve()
                for path in (job, job.parent.parent):
                    table.setdefault(path, []).append(int(pid))
        return table


def _began(pid: int) -> float:
    """Return when a process began: later than what a record says if its id was given again."""
    import psutil  # here: few commands need it

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time()
    return math.inf


def _words_of(pid: str) -> list[str]:
    """Return a process's command line; none if it has ended, or for a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 (a third of the time)
            text = os.fsdecode(file.read()).removesuffix("\0")
            return text.split("\0") if text else []
    except OSError:
        return []
