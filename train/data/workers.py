"""Processes that read ahead, and are started again when they die.

A worker is forked, so it needs no pickling, and writes into memory that it shares with its rank:
anonymous pages, since /dev/shm is small in containers. It has a pipe of its own, so a death is
noticed at once and breaks nothing of the others. It knows only which number to fetch: what that is
does not depend on how many workers there are.
"""

from __future__ import annotations

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
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import torch

from train.data.reading import Fetched
from train.data.source import Batch
from train.orphans import die_with_parent

Fetch = Callable[[int], Fetched]
Layout = list[tuple[torch.dtype, torch.Size, int]]

# Slurm and torchrun signal whole process groups. The rank finishes its step and ends its workers.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
DEATHS = 3
"""So often in a row a worker may die of the same batch."""


class WorkerError(RuntimeError):
    """A worker failed, or died again and again; the message names it."""


def in_order(
    fetch: Fetch, numbers: range, workers: int, ahead: int, rank: int = 0
) -> Iterator[Fetched]:
    """What `fetch` returns for each number, fetched by several processes, in order.

    Args:
        ahead: numbers that each worker may be ahead.
        rank: of this process, for messages.

    Raises:
        WorkerError: a worker raised, or died three times of one number.
    """
    if not numbers:
        return
    first, rest = fetch(numbers[0]), numbers[1:]  # the first shows how large a batch is
    size = sum(_aligned(tensor.nbytes) for tensor in first.batch)
    crew: list[_Worker] = []
    try:
        for number in range(min(workers, len(rest))):
            crew.append(_Worker(f"data worker {number} of rank {rank}", fetch, size, ahead))
        for place, number in enumerate(rest[: workers * ahead]):
            crew[place % workers].ask(number)
        yield first
        for place in range(len(rest)):
            worker = crew[place % workers]
            fetched = worker.answer()
            if place + workers * ahead < len(rest):
                worker.ask(rest[place + workers * ahead])
            yield fetched
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """One process, the numbers that were asked of it, and the memory that it answers in."""

    def __init__(self, name: str, fetch: Fetch, size: int, slots: int) -> None:
        self._name = name
        self._fetch = fetch
        self._slots = [mmap.mmap(-1, max(1, size)) for _ in range(slots)]
        self._asked: deque[tuple[int, int]] = deque()  # number and slot, the oldest first
        self._turn = 0
        self._deaths = 0
        self._start()

    def ask(self, number: int) -> None:
        """Let the worker fetch; it has no more asked of it than it has slots."""
        self._asked.append((number, self._turn % len(self._slots)))
        self._turn += 1
        self._send(self._asked[-1])

    def answer(self) -> Fetched:
        """The oldest that was asked and has not been answered, in memory of its own."""
        number, slot = self._asked[0]
        while True:
            try:
                reply = pickle.loads(self._pipe.recv_bytes())
                break
            except (EOFError, OSError):  # the latter in the middle of an answer
                self._start_again(number)
        self._asked.popleft()
        self._deaths = 0
        if isinstance(reply, str):
            raise WorkerError(f"{self._name}: {reply}")
        layout, problems = reply
        if isinstance(layout, Batch):
            return Fetched(layout, problems)
        parts = (view.clone() for view in _views(self._slots[slot], layout))
        return Fetched(Batch(*parts), problems)

    def end(self) -> None:
        """End the process at once: it holds nothing that would have to be put in order."""
        self._kill()

    def _start(self) -> None:
        self._pipe, its_end = multiprocessing.Pipe()
        # Held back until the worker ignores them, so that none ends it before.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = ForkProcess(
                target=_serve, args=(its_end, self._fetch, self._slots, os.getpid())
            )
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_end.close()  # the worker's copy is now the only one: when it dies, reading here ends
        # multiprocessing waits at exit for its children, which ignore that they are asked to end.
        self._kill = util.Finalize(self, _end, (self._process, self._pipe), exitpriority=1)

    def _start_again(self, number: int) -> None:
        self._process.join()
        self._deaths += 1
        died = f"{self._name} (pid {self._process.pid}) {_how(self._process)}"
        self._kill()
        if self._deaths == DEATHS:
            raise WorkerError(
                f"{died}, {DEATHS} times while it read batch {number}. If the machine ran out of "
                "memory, take fewer data.workers or a smaller data.prefetch; data.workers=0 reads "
                "in the rank itself and shows where it fails"
            )
        print(f"rollcall: {died}; started again", file=sys.stderr, flush=True)
        self._start()
        for request in self._asked:
            self._send(request)

    def _send(self, request: tuple[int, int]) -> None:
        with suppress(BrokenPipeError):  # it has died; `answer` finds that out
            self._pipe.send(request)


def _end(process: ForkProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


def _serve(pipe: Connection, fetch: Fetch, slots: Sequence[mmap.mmap], parent: int) -> None:
    """The worker: fetch what is asked for until the rank ends it, or is no more."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork, and cores are shared
    while True:
        asked, slot = pipe.recv()
        try:
            fetched = fetch(asked)
        except Exception as error:  # what it was is told by the rank
            _reply(pipe, f"{type(error).__name__}: {error}")
            continue
        layout = _layout(fetched.batch)
        views = _views(slots[slot], layout)
        for view, tensor in zip(views, fetched.batch, strict=False):
            view.copy_(tensor)
        _reply(pipe, (layout if views else fetched.batch, fetched.problems))


def _reply(pipe: Connection, reply: object) -> None:
    # Not pipe.send: torch would pass descriptors of tensors, which are gone when the worker dies.
    pipe.send_bytes(pickle.dumps(reply))


def _layout(batch: Batch) -> Layout:
    layout, offset = [], 0
    for tensor in batch:
        layout.append((tensor.dtype, tensor.shape, offset))
        offset += _aligned(tensor.nbytes)
    return layout


def _views(slot: mmap.mmap, layout: Layout) -> list[torch.Tensor]:
    """The tensors of a batch in shared memory; none if it is larger than the first one was."""
    views = []
    for dtype, shape, offset in layout:
        count = math.prod(shape)
        if offset + count * dtype.itemsize > len(slot):
            return []
        flat = torch.frombuffer(slot, dtype=dtype, count=count, offset=offset)
        views.append(flat.view(shape))
    return views


def _aligned(size: int) -> int:
    return math.ceil(size / 64) * 64


def _how(process: ForkProcess) -> str:
    code = process.exitcode or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
