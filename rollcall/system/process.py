"""Wait for signals, survive a full disk, die with the parent, leave a process. No torch."""

import contextlib
import ctypes
import errno
import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rollcall.system.timer import RunningClock

LIBC = ctypes.CDLL(None, use_errno=True)  # here: a forked child may not load it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NODE_LOST = signal.SIGRTMIN + 2
"""The signal to a rank that trains if a node is lost: no message will ever come from there."""
RESCUE = "rescue"
"""The name of a rank's process while it saves what the loss of another rank would undo."""
LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EPIPE})
"""Errors of writing output that must not end a run: nowhere to write it, or nobody who reads it."""
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for large pages: a process with fewer pages forks and ends sooner."""

is_fork = False
"""True in a process that was forked by a parent that has frozen what it imported."""
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # move a terminal's cursor, colour its text
CONTROL = re.compile(
    "\x1b(?!\\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Characters that control a terminal, except line ends and colours."""


class Printable(io.TextIOWrapper):
    """An output of commands, whose text from records could be meant to control a terminal."""

    def write(self, text: str) -> int:
        """Write a text with a replacement for each character that controls a terminal."""
        return super().write(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


class _Lossy(io.FileIO):
    copy: int | None = None
    line = b""

    def write(self, data: object) -> int:
        written = memoryview(data).nbytes  # type: ignore[arg-type]
        with _tolerated():
            written = super().write(data)  # type: ignore[arg-type]
        if self.copy is not None:  # also if the terminal is gone
            with _tolerated():
                self._copy_lines(ESCAPES.sub(b"", bytes(memoryview(data)[:written])))  # type: ignore[arg-type]
        return written

    def _copy_lines(self, data: bytes) -> None:
        """Copy finished lines; what a carriage return overwrites, like a progress bar, is lost."""
        *lines, line = (self.line + data).split(b"\n")
        self.line = line.rpartition(b"\r")[2]
        text = b"".join(line.rpartition(b"\r")[2] + b"\n" for line in lines)
        if text and self.copy is not None:
            os.write(self.copy, text)


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in LOST:
            raise


def stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


class StoppedProcesses:
    """Finds processes that somebody stopped, for example by SIGSTOP, and that stay stopped."""

    LIMIT = 5.0  # seconds after which one counts as lost; a suspended job stops us too

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._clock = RunningClock()

    def find(self, pids: Sequence[int]) -> list[int]:
        """Return the processes that have been stopped for LIMIT seconds."""
        now = self._clock.read()
        stopped = [pid for pid in pids if stat(pid)[:1] == ["T"]]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid in stopped if now - self._since[pid] > self.LIMIT]


def memory_kills() -> int:
    """Return how many processes of this one's control group the kernel has killed for memory."""
    folders = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):  # cgroup v2 or v1
                file = "memory.oom_control" if controllers else "memory.events"
                folders.append(Path(f"/sys/fs/cgroup/{controllers}{group}/{file}"))
    for path in folders:
        with contextlib.suppress(OSError):
            return sum(map(int, re.findall(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)))
    return 0


def outlast_full_disks() -> None:
    """Keep this process running if its output goes to a full disk or a closed pipe."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # a test captures it
            continue
        stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lossy)


def redirect_output(descriptor: int) -> None:
    """Write what this process and C++ code in it print to an open file from now on."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def output_is_closed() -> bool:
    """Return True if nobody reads what this process prints (`| head`, a dead terminal)."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in outputs.poll(0))


def keep_output(path: Path | None) -> None:
    """Copy what this process prints to a file as well, if `outlast_full_disks` was called."""
    _Lossy.copy = None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _Lossy.copy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:  # a convenience, which must not end a run
        print(f"rollcall: warning: {path}: no log is kept: {error.strerror}", file=sys.stderr)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait_for_signal(numbers: Iterable[int], seconds: float) -> int | None:
    """Return the first of these blocked signals to arrive; None if none does in this time.

    Python's own `signal.sigtimedwait` returns uninitialised memory if the process is stopped and
    continued while it waits and the time is over by then (3.11 to 3.13).
    """
    wanted = (ctypes.c_ulong * 32)()  # glibc's sigset_t; musl's is smaller
    LIBC.sigemptyset(wanted)
    for number in numbers:
        LIBC.sigaddset(wanted, number)
    end = time.monotonic() + seconds
    while True:
        left = max(0.0, end - time.monotonic())
        limit = _TimeSpec(int(left), int(left % 1 * 1e9))
        arrived: int = LIBC.sigtimedwait(wanted, None, ctypes.byref(limit))
        if arrived > 0:
            return arrived
        if ctypes.get_errno() != errno.EINTR:  # else another signal was handled, or SIGCONT came
            return None


def rescues(pid: int) -> bool:
    """Return True while a process saves because another one is lost."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == RESCUE
    return False


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; see prctl(2)."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without shutting the interpreter down.

    A thread of gloo outlives the process group. If it drops its last tensor while the interpreter
    shuts down, the process aborts (seen with torch 2.15).
    """
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
