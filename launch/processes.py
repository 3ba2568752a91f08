"""What the kernel knows of a node's processes: who handles which signal, who is whose child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and stop."""
PATIENCE = 10.0
"""Seconds that a rank has to install a handler before SIGTERM or SIGINT reaches it anyway."""
FROZEN = 5.0
"""Seconds after which a stopped process counts as lost. A suspended job stops us as well."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


class Request:
    """A signal that each rank must get once, as soon as it can do something with it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached: set[int] = set()
        self._seen: dict[int, float] = {}

    def deliver(self, ranks: Sequence[int]) -> None:
        """Send the signal to the ranks that have not had it and have a handler for it."""
        # SIGTERM and SIGINT end a program without handlers, as they should; USR1 and USR2 would
        # end it by accident.
        ends_anything = self.number in (signal.SIGTERM, signal.SIGINT)
        now = time.monotonic()
        for pid in set(ranks) - self.reached:
            overdue = now - self._seen.setdefault(pid, now) > PATIENCE
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if (overdue and ends_anything) or _handles(pid, self.number):
                    os.kill(pid, self.number)
                    self.reached.add(pid)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def become_agent() -> None:
    """Between fork and exec of the agent: it ignores what we pass on to its ranks ourselves.

    On some clusters Slurm signals every process of a step, this one too while it still imports.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _handles(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def end_orphans(keep: int | None = None) -> None:
    """End what an agent has left behind; as its subreaper we have inherited it.

    Args:
        keep: a child that stays.
    """
    while orphans := [
        child for child in psutil.Process().children(recursive=True) if child.pid != keep
    ]:
        for child in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


class Frozen:
    """Finds processes that somebody has stopped, such as by SIGSTOP, and that do not go on."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def find(self, pids: Sequence[int]) -> list[int]:
        """Those of these processes that have been seen stopped for FROZEN seconds."""
        now = time.monotonic()
        stopped = [pid for pid in pids if _state(pid) == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid in stopped if now - self._since[pid] > FROZEN]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
