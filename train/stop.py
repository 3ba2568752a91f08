"""Who asked us to stop, and do all ranks agree? Signals only raise a flag here.

One small collective per step carries the flags of all ranks, and what else they must know of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

PERSON = frozenset({signal.SIGINT})
SCHEDULER = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


class StopSignals:
    """Remembers the first signal that asked this rank to stop.

    Signals can come twice (Slurm repeats SIGTERM) and at any moment, so the handler does nothing
    but remember; a second Ctrl-C ends the process at once.

    Attributes:
        received: the signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopSignals:
        for number in PERSON | SCHEDULER:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def by_person(self) -> bool:
        """Whether a person asked, at a keyboard."""
        return self.received in PERSON

    @property
    def by_scheduler(self) -> bool:
        """Whether Slurm, torchrun or another program asked."""
        return self.received in SCHEDULER

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


class Agreement:
    """A step's sums over all ranks, on their way: every rank will read the same.

    Attributes:
        step: updates done.
        begun: when, by time.perf_counter.
    """

    def __init__(self, step: int, values: torch.Tensor, more: Sequence[float]) -> None:
        """Start to sum, without waiting for the network or the GPU.

        Args:
            step: updates done.
            values: (n,) fp32, on the device of the rank.
            more: numbers of the host, such as one or zero for what this rank wishes.
        """
        self.step, self.begun = step, time.perf_counter()
        on_gpu = values.is_cuda
        host_values = torch.tensor(more, dtype=values.dtype, pin_memory=on_gpu)
        self._sums = torch.cat([values, host_values.to(values.device, non_blocking=True)])
        self._work = dist.all_reduce(self._sums, async_op=True)
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._work.wait()  # with NCCL the stream waits, not this thread
            host = torch.empty_like(self._sums, device="cpu", pin_memory=True)
            self._sums = host.copy_(self._sums, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> list[float]:
        """The sums of both; waits until they are here."""
        if self._copied is None:
            self._work.wait()
        else:
            self._copied.synchronize()
        return self._sums.tolist()
