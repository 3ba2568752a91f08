"""Processes that read batches ahead, and are restarted when they die.

torch's DataLoader cannot restart a worker, and needs /dev/shm, which is small in containers. Here a
worker is forked, so nothing is pickled, and writes into anonymous memory that it shares with its
rank. It has its own pipe, so its death is noticed at once and does not affect the others. It only
gets the number of a batch, so the number of workers does not change the data.
"""

import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import torch

from rollcall.system.process import die_with_parent
from rollcall.train.data.reader import ReadResult, error_prefix
from rollcall.train.data.source import Batch
from rollcall.train.ranks.signals import PERSON, SCHEDULER
from rollcall.train.torch_private import tree_flatten, tree_unflatten

Fetch = Callable[[int], ReadResult]
Layout = list[tuple[torch.dtype, torch.Size, int]]

# Slurm and torchrun signal whole process groups. The rank finishes its step, then ends its workers.
IGNORED_SIGNALS = PERSON | SCHEDULER
MAX_DEATHS = 3
"""The run fails after this many deaths in a row at the same batch."""


class WorkerError(RuntimeError):
    """A worker failed; the message names it."""


class WorkerDiedError(WorkerError):
    """A worker died repeatedly, for example of too little memory: a new attempt may succeed."""


def in_order(
    fetch: Fetch, numbers: range, workers: int, ahead: int, rank: int = 0, pins: bool = False
) -> Iterator[ReadResult]:
    """Yield `fetch(number)` in order; workers compute `ahead` each. WorkerError if one fails."""
    if not numbers:
        return
    first, rest = fetch(numbers[0]), numbers[1:]  # all batches have its size
    size = sum(_aligned(tensor.nbytes) for tensor in first.batch.tensors)
    pool: list[_Worker] = []
    try:
        for number in range(min(workers, len(rest))):
            pool.append(_Worker(f"data worker {number} of rank {rank}", fetch, size, ahead, pins))
        for turn, number in enumerate(rest[: workers * ahead]):
            pool[turn % workers].ask(number)
        yield first
        for turn in range(len(rest)):
            worker = pool[turn % workers]
            fetched = worker.answer()
            if turn + workers * ahead < len(rest):
                worker.ask(rest[turn + workers * ahead])
            yield fetched
    finally:
        for worker in pool:
            worker.kill()


class _Worker:
    """A process, the requests that it has not answered, and the memory for its answers."""

    def __init__(self, name: str, fetch: Fetch, size: int, slots: int, pins: bool) -> None:
        self._name, self._fetch, self._pins = name, fetch, pins
        self._slots = [mmap.mmap(-1, max(1, size)) for _ in range(slots)]
        self._asked: deque[tuple[int, int]] = deque()  # number and slot, the oldest first
        self._turn = self._deaths = 0
        self._start()

    def ask(self, number: int) -> None:
        """Ask for a batch; the caller never has more open requests than there are slots."""
        self._asked.append((number, self._turn % len(self._slots)))
        self._turn += 1
        self._send(self._asked[-1])

    def answer(self) -> ReadResult:
        """Wait for the oldest requested batch; return a copy."""
        number, slot = self._asked[0]
        while True:
            try:
                reply = pickle.loads(self._pipe.recv_bytes())
                break
            except (EOFError, OSError):  # OSError: the worker died in the middle of an answer
                self._restart(number)
        self._asked.popleft()
        self._deaths = 0
        if isinstance(reply, str):
            raise WorkerError(f"{self._name}: {reply}")
        layout, spec, problems, position = reply
        if isinstance(layout, Batch):
            return ReadResult(layout, problems, position)
        views = _views(self._slots[slot], layout)
        tensors = [torch.empty_like(view, pin_memory=self._pins).copy_(view) for view in views]
        return ReadResult(tree_unflatten(tensors, spec), problems, position)

    def _start(self) -> None:
        self._pipe, worker_end = multiprocessing.Pipe()
        # They are blocked until the worker ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process = ForkProcess(
                target=_serve, args=(worker_end, self._fetch, self._slots, os.getpid())
            )
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker_end.close()  # so that a read here ends when the worker dies
        # At exit multiprocessing waits for its children, which ignore its SIGTERM.
        self.kill = util.Finalize(self, _end, (self._process, self._pipe), exitpriority=1)

    def _restart(self, number: int) -> None:
        self._process.join()
        self._deaths += 1
        code = self._process.exitcode or 0
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        cause = killed or f"exited with code {code}"
        died = f"{self._name} (pid {self._process.pid}) {cause}"
        self.kill()
        if self._deaths == MAX_DEATHS:
            raise WorkerDiedError(
                f"{died}, {MAX_DEATHS} times while reading batch {number}. If the machine is out "
                "of memory, reduce data.num_workers or data.prefetch_factor; data.num_workers=0 "
                "reads in the rank itself and shows where it fails"
            )
        print(f"rollcall: {died}; restarted", file=sys.stderr, flush=True)
        self._start()
        for request in self._asked:
            self._send(request)

    def _send(self, request: tuple[int, int]) -> None:
        with suppress(BrokenPipeError):  # the worker has died, which `answer` notices
            self._pipe.send(request)


def _end(process: ForkProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


def _serve(pipe: Connection, fetch: Fetch, slots: Sequence[mmap.mmap], parent: int) -> None:
    """Run a worker: fetch each requested batch, until the rank kills this process or dies."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork, and cores are shared
    while True:
        number, slot = pipe.recv()
        try:
            result = fetch(number)
        except (Exception, SystemExit) as error:  # the rank raises it
            _reply(pipe, f"{error_prefix(error)}{error}")
            continue
        tensors, spec = tree_flatten(result.batch)
        starts = accumulate((_aligned(tensor.nbytes) for tensor in tensors), initial=0)
        layout = [(t.dtype, t.shape, start) for t, start in zip(tensors, starts, strict=False)]
        views = _views(slots[slot], layout)
        for view, tensor in zip(views, tensors, strict=False):
            view.copy_(tensor)
        _reply(pipe, (layout if views else result.batch, spec, result.problems, result.position))


def _reply(pipe: Connection, reply: object) -> None:
    # With pipe.send, torch would pass file descriptors, which are lost when the worker dies.
    pipe.send_bytes(pickle.dumps(reply))


def _views(slot: mmap.mmap, layout: Layout) -> list[torch.Tensor]:
    """Return the tensors of a batch in shared memory; [] if it is larger than the first batch."""
    views = []
    for dtype, shape, offset in layout:
        count = math.prod(shape)
        if offset + count * dtype.itemsize > len(slot):
            return []
        empty = torch.empty(0, dtype=dtype)  # torch.frombuffer makes no empty tensor
        flat = torch.frombuffer(slot, dtype=dtype, count=count, offset=offset) if count else empty
        views.append(flat.view(shape))
    return views


def _aligned(size: int) -> int:
    return math.ceil(size / 64) * 64
