"""How does a save not stop the training? What runs beside it, and the copy that it works on.

On the CPU a forked process sees the memory as it was, at the cost of copying the page tables: that
is a tenth of what torch.save takes, where a copy into a buffer is a quarter of it or more. What a
process may not do with CUDA, nor see of pinned memory, a thread does: it works on a pinned buffer
that is allocated once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn, Protocol

import torch

from train.checkpoint.manifest import Damaged
from train.checkpoint.read import view
from train.orphans import die_with_parent
from train.stop import PERSON, SCHEDULER

Work = Callable[[], object]
ALIGNMENT = 64  # bytes; every type of numbers may start at a multiple
BEGIN = 5.0  # seconds in which a forked process begins; it may hang in what another thread held
TRIES = 3
BEGUN = b"\1"


class Job(Protocol):
    """Work that has been started."""

    def poll(self) -> str | None:
        """None while it runs, then the problem that it met, or nothing."""

    def abandon(self) -> None:
        """End it, or leave it alone where it cannot be ended."""


class Forked:
    """Work in a process of its own, on the memory as it is now."""

    _ending: ClassVar[list[int]] = []  # processes that have told their result

    def __init__(self, work: Work) -> None:
        self._problem: str | None = None
        Forked._ending = [pid for pid in Forked._ending if not _has_ended(pid)]
        for _ in range(TRIES):
            try:
                self._pid, self._end = _fork(work)
            except OSError:  # no memory for another process, even one that shares it
                break
            if _tells(self._end, BEGIN):
                os.read(self._end, len(BEGUN))
                return
            self._kill()
        self._problem = _attempt(work)

    def poll(self) -> str | None:
        """None while it runs, then the problem that it met, or nothing."""
        if self._problem is None:
            try:
                text = os.read(self._end, 8192)
            except BlockingIOError:
                return None
            # What it had to say comes before its end, and a long time before with much memory.
            self._problem = text[1:].decode() if text else self._death()
            self._let_go()
        return self._problem

    def abandon(self) -> None:
        """Kill the process; one that hangs in the file system dies when that answers."""
        if self.poll() is None:
            self._kill()
            self._problem = "abandoned"

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._end)
        Forked._ending.append(self._pid)

    def _death(self) -> str:
        ended = None
        with contextlib.suppress(ChildProcessError):  # as in _has_ended
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return f"the writing process ended with {ended.si_status if ended else 'nothing'}"


class Threaded:
    """Work in a thread: writing, digesting and syncing leave Python's lock to the training."""

    def __init__(self, work: Work) -> None:
        self._problem: str | None = None
        threading.Thread(target=self._run, args=[work], daemon=True).start()

    def poll(self) -> str | None:
        """None while it runs, then the problem that it met, or nothing."""
        return self._problem

    def abandon(self) -> None:
        """Leave it alone: a thread cannot be ended."""

    def _run(self, work: Work) -> None:
        self._problem = _attempt(work)


class PinnedBuffer:
    """Host memory for what a GPU holds, allocated once and used by every save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Copy the tensors; returns when the copies are whole."""
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if end > len(self._memory):
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        views = []
        for tensor, start in zip(tensors, starts, strict=True):
            part = self._memory[start : start + tensor.nbytes]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append(view(part))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return views


def in_place(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """The bytes of tensors in host memory, for a process that is forked now.

    Memory that is shared between processes is copied: a fork would see it change.
    """
    views = []
    for lazy in tensors:
        tensor = lazy.resolve_conj().resolve_neg()
        is_shared = tensor.is_shared()  # type: ignore[no-untyped-call]
        views.append(view(tensor.clone() if is_shared else tensor.contiguous()))
    return views


def _fork(work: Work) -> tuple[int, int]:
    """Fork a process; its id, and a pipe that tells when it begins with the work and how it ends.

    Raises:
        OSError: there is no memory for another process, even one that shares it.
    """
    own_end, end = os.pipe()
    os.set_blocking(own_end, False)
    parent = os.getpid()
    # Blocked in the child for good: who stops the job does not stop the save.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PERSON | SCHEDULER)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads: a child that meets a lock of theirs is
            # replaced by another.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _child(work, end, parent)
    except OSError:
        os.close(own_end)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(end)
    return pid, own_end


def _tells(end: int, seconds: float) -> bool:
    """Wait until there is something in a pipe, or its other end is closed."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _child(work: Work, end: int, parent: int) -> NoReturn:
    """Do the work and nothing else: no collection of others' objects, no exit hooks.

    The copies of the sockets are closed, so that peers see at once when this rank dies; and the
    process dies with the rank.
    """
    problem = "interrupted"
    try:
        gc.disable()
        die_with_parent()
        os.closerange(3, end)
        os.closerange(end + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(end, BEGUN)
        if os.getppid() == parent:
            problem = _attempt(work)
        with contextlib.suppress(OSError):
            os.write(end, b"\0" + problem.encode()[:4000])
    finally:
        os._exit(bool(problem))


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # where a handler of the user's waits for every child
        return True


def _attempt(work: Work) -> str:
    try:
        work()
    except (OSError, Damaged) as error:
        return str(error)
    except Exception as error:  # a defect of ours must not end the training either
        return f"{type(error).__name__}: {error}"
    return ""
