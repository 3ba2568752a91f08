"""Writing a checkpoint beside the training: in a forked process or a thread.

A forked process sees the memory at the moment of the fork, which takes a tenth of the time of
torch.save. It can use neither CUDA nor pinned memory, so on a GPU a thread writes a pinned copy.
"""

import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from multiprocessing.connection import wait
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist

from rollcall.system.process import die_with_parent, keep_output
from rollcall.train.checkpoint.contents import Damaged
from rollcall.train.checkpoint.read import view
from rollcall.train.ranks.signals import PERSON, SCHEDULER

Work = Callable[[], object]
ALIGNMENT = 64
"""Bytes; a tensor of any type may start at a multiple."""
START_TIMEOUT = 5.0
"""Seconds for a forked process to start; it may hang on a lock that another thread held."""
START_ATTEMPTS = 3
STARTED = b"\1"


class ProcessJob:
    """Work in a forked process, on the memory at the moment of the fork."""

    _to_reap: ClassVar[list[int]] = []  # processes that have reported their result

    def __init__(self, work: Work) -> None:
        self._problem: str | None = None
        ProcessJob._to_reap = [pid for pid in ProcessJob._to_reap if not _has_ended(pid)]
        for _ in range(START_ATTEMPTS):
            try:
                self._pid, self._pipe = _fork(work)
            except OSError:  # not enough memory for another process
                break
            if wait([self._pipe], START_TIMEOUT):
                os.read(self._pipe, len(STARTED))
                return
            self._kill()
        self._problem = _attempt(work)

    def poll(self) -> str | None:
        """Return None while the work runs, then its problem; empty if it succeeded."""
        if self._problem is None:
            try:
                text = os.read(self._pipe, 8192)
            except BlockingIOError:
                return None
            # The result arrives before the process ends, which takes long with much memory.
            self._problem = text[1:].decode() if text else self._death()
            self._release()
        return self._problem

    def abandon(self) -> None:
        """Kill the process; one that hangs in the file system dies when the system call returns."""
        if self.poll() is None:
            self._kill()
            self._problem = "abandoned"

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._release()

    def _release(self) -> None:
        os.close(self._pipe)
        ProcessJob._to_reap.append(self._pid)

    def _death(self) -> str:
        ended = None
        with contextlib.suppress(ChildProcessError):  # see _has_ended
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        status = ended.si_status if ended else "unknown"
        who = f"the writing process of rank {dist.get_rank() if dist.is_initialized() else 0}"
        return f"{who} died without a result (exit code or signal: {status})"


class ThreadJob:
    """Work in a thread: writes, checksums and syncs release Python's lock."""

    def __init__(self, work: Work) -> None:
        self._problem: str | None = None
        threading.Thread(target=self._run, args=[work], daemon=True).start()

    def poll(self) -> str | None:
        """Return None while the work runs, then its problem; empty if it succeeded."""
        return self._problem

    def abandon(self) -> None:
        """Do nothing: a thread cannot be stopped."""

    def _run(self, work: Work) -> None:
        self._problem = _attempt(work)


WriteJob = ProcessJob | ThreadJob


class PinnedBuffer:
    """Host memory for a GPU's state, allocated once and reused by every save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Copy the tensors; return the bytes of each copy once all are complete."""
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        *starts, end = accumulate(sizes, initial=0)
        if end > len(self._memory):
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        views = []
        for tensor, start in zip(tensors, starts, strict=True):
            part = self._memory[start : start + tensor.nbytes]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append(view(part))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return views


def host_views(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the bytes of tensors in host memory, for a fork; memory that is shared is copied."""
    plain = [lazy.resolve_conj().resolve_neg() for lazy in tensors]
    return [view(t.clone() if t.is_shared() else t.contiguous()) for t in plain]  # type: ignore[no-untyped-call]


def _fork(work: Work) -> tuple[int, int]:
    """Return a process's id and a pipe, to which it writes when it starts and when it ends."""
    read_end, end = os.pipe()
    os.set_blocking(read_end, False)
    parent = os.getpid()
    # The child keeps them blocked: a signal that stops the job must not stop the save.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PERSON | SCHEDULER)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about locks of threads; `__init__` replaces a child that hangs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _child(work, end, parent)
    except OSError:
        os.close(read_end)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(end)
    return pid, read_end


def _child(work: Work, end: int, parent: int) -> NoReturn:
    problem = "interrupted"
    try:
        gc.disable()
        die_with_parent()
        # Without its copies of the sockets, peers notice at once when this rank dies.
        keep_output(None)
        os.closerange(3, end)
        os.closerange(end + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(end, STARTED)
        if os.getppid() == parent:
            problem = _attempt(work)
        with contextlib.suppress(OSError):
            os.write(end, b"\0" + problem.encode()[:4000])
    finally:
        os._exit(bool(problem))


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # a handler of the user's has waited for it
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _attempt(work: Work) -> str:
    try:
        work()
    except (OSError, Damaged) as error:
        return str(error)
    except Exception as error:  # a bug in the writer must not stop the training either
        return f"{type(error).__name__}: {error}"
    return ""
