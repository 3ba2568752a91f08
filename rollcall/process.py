"""How a process waits for signals, survives a full disk, dies with its parent, exits. No torch."""

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EPIPE})
"""Errors of writing output that must not end a run: nowhere to write it, or nobody who reads it."""

LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for large pages: a process with fewer pages forks and ends sooner."""

is_fork = False
"""Whether a parent that has frozen what it imported has forked this process."""
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences that move a terminal's cursor or colour its text."""


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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


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


def output_is_closed() -> bool:
    """Whether nobody reads what this process prints, as after `| head`."""
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
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = (ctypes.c_ulong * 32)()  # glibc's sigset_t; musl's is smaller
    libc.sigemptyset(wanted)
    for number in numbers:
        libc.sigaddset(wanted, number)
    end = time.monotonic() + seconds
    while True:
        left = max(0.0, end - time.monotonic())
        limit = _TimeSpec(int(left), int(left % 1 * 1e9))
        found: int = libc.sigtimedwait(wanted, None, ctypes.byref(limit))
        if found > 0:
            return found
        if ctypes.get_errno() != errno.EINTR:  # else another signal was handled, or SIGCONT came
            return None


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; see prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without shutting the interpreter down.

    A thread of gloo outlives the process group. If it drops its last tensor while the interpreter
    shuts down, the process aborts (seen with torch 2.15).
    """
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
