"""Let all ranks agree on their steps: one all-reduce of small numbers, read one step later.

Steps of a few milliseconds share an all-reduce. Every rank knows by itself whether a step changed
the weights, because the gradient is NaN on all ranks if one of them has a problem. So an exchange
may wait while all steps succeed, and takes place at once if one does not.
"""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.clock import clock
from rollcall.train.ranks.device import Copied, upload


class Action(enum.IntEnum):
    """The action of the trainer once all ranks know about a step; the largest one wins."""

    CONTINUE = 0
    REQUEUE = 1  # save and exit: the scheduler asked for it, or the job is about to end
    STOP = 2  # save and exit: a person asked for it


class FaultError(RuntimeError):
    """Training cannot continue; the message says why and what to do."""


SPACING = 0.03
"""Seconds that lie at least between two exchanges, unless a step needs one: an exchange takes up to
a millisecond on CPUs, and nobody needs to hear of a signal or a straggler sooner."""
MOST = 1000
"""The most steps that share an exchange."""


@dataclass(frozen=True)
class Step:
    """The facts that all ranks know about a step.

    Steps of less than SPACING seconds share an exchange, of which this is the newest. All others
    have changed the weights. If this one did not, a member that looks at results should ignore it.
    """

    number: int  # updates done, this one included
    steps: int  # that share the exchange
    seconds: float  # from one step to the next, a mean over these steps
    is_skipped: bool  # whether the weights did not change
    loss: float  # mean over the targets that count
    grad_norm: float  # before clipping
    count: float  # samples that count, each in so far as its targets do
    has_counted: bool  # whether a target of any step of this attempt counts


Number = float | torch.Tensor
Numbers = TypeVar("Numbers")


class Member(Protocol[Numbers]):
    """A part of the run that reports numbers and acts on their sums over the ranks.

    `Numbers` is a dataclass of the member's own, or a dictionary. Each of its values is a number,
    or a vector: a tensor or a list of numbers. With `log.every=1`, or if a member has a true
    `wants_every_step`, every step is reported; otherwise the newest of several that share an
    exchange. The order of the members does not matter.
    """

    def report(self) -> Numbers:
        """Return this rank's numbers for the newest step.

        A vector may have another size than before, also none, if all ranks know it. Numbers are
        summed over the ranks as fp64, so whole numbers stay exact. If all ranks know the same
        number, each reports its share: the number divided by the world size. For one number per
        rank, see `one_slot`. What is on a GPU is summed without waiting for it.
        """
        ...

    def settle(self, step: Step, agreed: Numbers) -> Action:
        """Act on a step's sums, a step later: floats or lists of floats, the same on all ranks."""
        ...


Members = Sequence[Member[Any]]


def one_slot(value: Number, rank: int, world_size: int) -> list[Number]:
    """Return a vector with a number for each rank, of which this one gives its own value."""
    slots: list[Number] = [0.0] * world_size
    slots[rank] = value
    return slots


class Exchange(NamedTuple):
    """The sums over all ranks of what was reported after a step."""

    step: int
    steps: int  # that share the exchange
    seconds: float  # of each of them
    sums: list[Any]  # of each report, in its form


_Layout = tuple[type, dict[Any, int | slice]]
"""The type of a report, and the position of each of its values among the sums."""


class Agreement:
    """Sums the reports of the ranks by one late collective; nobody else knows the packing."""

    def __init__(self, reports: Sequence[Callable[[], Any]], device: torch.device) -> None:
        self._reports = reports  # in the same order on every rank
        self._device = device
        self._is_main, self._is_alone = dist.get_rank() == 0, dist.get_world_size() == 1
        self._pending: tuple[int, int, list[_Layout], dist.Work | None, Copied] | None = None
        self.restart()

    def restart(self, every_step: bool = False) -> None:
        """Exchange numbers after the next step, as at the start and after a rollback."""
        self._steps = self._next = 0  # since the newest exchange; the step of the next one
        self._quiet: tuple[int, Copied] | None = None  # the newest step, if it was not exchanged
        self._before = time.perf_counter()
        self._every_step = every_step

    def send(self, step: int, skipped: torch.Tensor, is_due: bool) -> None:
        """Note a step, on every rank; begin an exchange if the step `is_due` or it is time."""
        self._steps += 1
        if is_due or self._every_step or step >= self._next:
            self._exchange(step)
        else:
            self._quiet = step, Copied(skipped)

    def receive(self, now: bool = False) -> Exchange | None:
        """Return the newest sums, once; a skipped step, or any with `now`, is exchanged first."""
        if self._quiet and (now or self._quiet[1].read()):
            self._exchange(self._quiet[0])
        if self._pending is None:
            return None
        (step, steps, layouts, *pending), self._pending = self._pending, None
        sums = _read(*pending)
        self._next = step + min(MOST, max(1, int(SPACING / max(sums[0], 1e-6))))
        return Exchange(step, steps, sums[0], _unpacked(sums, layouts))

    def _exchange(self, step: int) -> None:
        now = time.perf_counter()
        # All ranks choose the next exchange by rank 0's mean time of a step: one term, so that the
        # sum has the same bits on every rank.
        mean = (now - self._before) / max(1, self._steps) if self._is_main else 0.0
        reports = [report() for report in self._reports]
        vector, layouts = _packed(mean, reports, self._device)
        work = None if self._is_alone else dist.all_reduce(vector, async_op=True)
        if work and vector.is_cuda:
            work.wait()  # with NCCL the stream waits, not this thread
            work = None
        self._pending = step, self._steps, layouts, work, Copied(vector)
        self._steps, self._before, self._quiet = 0, now, None


def _packed(
    seconds: float, reports: Sequence[Any], device: torch.device
) -> tuple[torch.Tensor, list[_Layout]]:
    """Return all numbers in the same order on all ranks, and the layout of each report."""
    numbers, layouts = [seconds], list[_Layout]()
    on_gpu: list[tuple[int, torch.Tensor]] = []
    for report in reports:
        positions: dict[Any, int | slice] = {}
        for name, value in (report if isinstance(report, dict) else vars(report)).items():
            first, is_list = len(numbers), isinstance(value, list)
            for leaf in value if is_list else (value,):
                if not isinstance(leaf, torch.Tensor):
                    numbers.append(float(leaf))
                elif leaf.is_cuda:
                    on_gpu.append((len(numbers), leaf))
                    numbers += [0.0] * leaf.numel()
                else:
                    numbers += leaf.reshape(-1).tolist()
            is_vector = is_list or getattr(value, "ndim", 0) > 0
            positions[name] = slice(first, len(numbers)) if is_vector else first
        layouts.append((type(report), positions))
    vector = upload(torch.tensor(numbers, dtype=torch.float64), device)
    for first, leaf in on_gpu:  # not read by the host, which would wait for the GPU
        vector[first : first + leaf.numel()] = leaf.reshape(-1)
    return vector, layouts


def _unpacked(sums: list[float], layouts: Sequence[_Layout]) -> list[Any]:
    named = ((kind, {n: sums[at] for n, at in positions.items()}) for kind, positions in layouts)
    return [values if issubclass(kind, dict) else kind(**values) for kind, values in named]


@clock.waiting
@doing("waiting for the other ranks")
def _read(work: dist.Work | None, copied: Copied) -> list[float]:
    if work:
        work.wait()
    return list(copied.read())
