"""The processes of a node: signals they handle, their children, orphans, stopped ones."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rollcall.process import stat
from rollcall.timer import RunningClock

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and stop."""
PATIENCE = 10.0
"""Seconds that a rank has to install a handler before it gets SIGTERM or SIGINT anyway."""
START = 30.0
"""Seconds after its start from which a rank without a handler is not waited for."""
STOPPED = 5.0
"""Seconds after which a stopped process counts as lost. (A suspended job stops us too.)"""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
"""Whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""

_libc = ctypes.CDLL(None, use_errno=True)


class SignalDelivery:
    """A signal that each rank must get once, as soon as it has a handler for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached: set[int] = set()
        self._seen: dict[int, float] = {}
        self._clock = RunningClock()

    def deliver(self, ranks: Mapping[int, float]) -> None:
        """Send the signal to the ranks that have a handler for it and have not had it yet.

        Args:
            ranks: for how many seconds each has run its program, by process id.
        """
        # A program without handlers should end at SIGTERM and SIGINT, but not at USR1 and USR2.
        ends_anything = self.number in (signal.SIGTERM, signal.SIGINT)
        now = self._clock.read()
        for pid in set(ranks) - self.reached:
            if _is_in_mask(pid, "SigIgn:", self.number):  # too early: it would be lost
                continue
            waited = now - self._seen.setdefault(pid, now)
            overdue = waited > PATIENCE or ranks[pid] > START
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if (overdue and ends_anything) or _is_in_mask(pid, "SigCgt:", self.number):
                    os.kill(pid, self.number)
                    self.reached.add(pid)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def become_agent() -> None:
    """Prepare the fork server between fork and exec: it ignores signals meant for the ranks.

    On some clusters Slurm signals every process of a step, including this one during its imports.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_in_mask(pid: int, mask: str, number: int) -> bool:
    """Whether a signal is in a mask of /proc/PID/status; not if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(mask):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def children(pid: int) -> list[int]:
    """List the direct children of a process, without a look at all processes of the host."""
    found: list[int] = []
    ended = (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess)
    with contextlib.suppress(*ended):
        if not LISTS_CHILDREN:
            return [child.pid for child in psutil.Process(pid).children()]
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (names, not paths)
            with contextlib.suppress(*ended):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def end_orphans(keep: int | None = None) -> None:
    """End all processes that the ranks left behind, but not our child `keep` and its children.

    A process whose parent has ended is our own child.
    """
    while orphans := [child for child in children(os.getpid()) if child != keep]:
        for child in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)


class StoppedProcesses:
    """Finds processes that somebody stopped, for example by SIGSTOP, and that stay stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._clock = RunningClock()

    def find(self, pids: Sequence[int]) -> list[int]:
        """Return the processes that have been stopped for STOPPED seconds."""
        now = self._clock.read()
        stopped = [pid for pid in pids if stat(pid)[:1] == ["T"]]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid in stopped if now - self._since[pid] > STOPPED]
