"""Let all ranks agree on their steps: one all-reduce of small numbers, read one step later.

Steps of a few milliseconds share an all-reduce. Every rank knows by itself whether a step changed
the weights, because the gradient is NaN on all ranks if one of them has a problem. So an exchange
may wait while all steps succeed, and takes place at once if one does not.
"""

import enum
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from rollcall.activity import doing
from rollcall.config import ConfigError
from rollcall.train.dist.clock import clock
from rollcall.train.dist.device import Copied, upload


class Action(enum.IntEnum):
    """The action of the trainer once all ranks know about a step; the largest one wins."""

    CONTINUE = 0
    REQUEUE = 1  # save and exit: the scheduler asked for it, or the job is about to end
    STOP = 2  # save and exit: a person asked for it
    REPEAT = 3  # compute the step again: a rank ran out of memory


class FaultError(RuntimeError):
    """Training cannot continue; the message says why and what to do."""


SPACING = 0.03
"""Seconds that lie at least between two exchanges, unless a step needs one: an exchange takes up to
a millisecond on CPUs, and nobody needs to hear of a signal or a straggler sooner."""
MOST = 1000
"""The most steps that share an exchange."""


class Member(Protocol):
    """A part of the run that reports numbers and acts on their sums over the ranks.

    Steps of less than SPACING seconds share an exchange: the newest of them is reported, and
    `agreed["steps"]` is their number. All but the newest have changed the weights. If that
    one did not, `agreed["skipped"]` is positive, and a member that looks at results should ignore
    it. With `log.every=1` every step is reported, and if a member has a true `wants_every_step`.
    """

    def report(self) -> Mapping[str, float | torch.Tensor]:
        """Return this rank's numbers for the newest step, with the same names each time.

        A vector may have another size than before, also none, if all ranks know it. Numbers are
        summed over the ranks as fp64, so whole numbers stay exact. If all ranks know the same
        number, each reports its share: the number divided by the world size. For one number per
        rank, see `one_slot`. What is on a GPU is summed without waiting for it.
        """

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Act on the sums of a step, one step later.

        Args:
            step: updates done, including the one that the numbers are about.
            agreed: the sums of all members' numbers by name, the same on every rank: a float, or a
                list of floats if a vector was reported. So all ranks may raise an error together.
        """


def one_slot(value: float | torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a vector (world_size,), zero except at `rank`, on the value's device or the CPU."""
    device = value.device if isinstance(value, torch.Tensor) else None
    slots = torch.zeros(world_size, dtype=torch.float64, device=device)
    slots[rank] = value
    return slots


class Agreement:
    """Sums the numbers of all members over the ranks, with at most one collective per step.

    Nobody else knows how the numbers are packed. Neither the network nor the GPU is waited for
    until the sums are read, when the next gradient is already being computed.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self._members = members  # in the order in which they settle, the same on every rank
        self._device = device
        self._layout: list[tuple[str, int | None]] = []
        self._pending: tuple[int, int, _Sums] | None = None
        self.restart()

    def restart(self) -> None:
        """Exchange numbers after the next step, as at the start and after a rollback."""
        self._steps = self._next = 0  # since the newest exchange; the step of the next one
        self._quiet: tuple[int, Copied] | None = None  # the newest step, if it was not exchanged
        self._before = time.perf_counter()
        self._each = any(getattr(member, "wants_every_step", False) for member in self._members)

    def send(self, step: int, skipped: torch.Tensor, is_due: bool) -> None:
        """Note that `step` updates are done, the newest of which may have been skipped.

        Every rank calls it together. If the step `is_due`, or it is time, an exchange begins.
        """
        self._steps += 1
        if is_due or self._each or step >= self._next:
            self._exchange(step)
        else:
            self._quiet = step, Copied(skipped)

    def settle(self, now: bool = False) -> Action:
        """Let the members act on what was sent, and return the strongest action.

        If a member answers REPEAT, the members after it hear about the step when it was repeated.
        If the newest step was skipped, or with `now`, its numbers are exchanged first.
        """
        if self._quiet and (now or self._quiet[1].read()):
            self._exchange(self._quiet[0])
        if self._pending is None:
            return Action.CONTINUE
        (step, steps, sums), self._pending = self._pending, None
        agreed = self._unpack(sums.read()) | {"steps": steps}
        self._next = step + min(MOST, max(1, int(SPACING / max(agreed["seconds"], 1e-6))))
        action = Action.CONTINUE
        for member in self._members:
            action = max(action, member.settle(step, agreed))
            if action is Action.REPEAT:
                break
        return action

    def _exchange(self, step: int) -> None:
        now = time.perf_counter()
        # All ranks choose the next exchange by rank 0's mean time of a step: one term, so that the
        # sum has the same bits on every rank.
        mean = (now - self._before) / max(1, self._steps)
        reported = self._pack(mean if dist.get_rank() == 0 else 0.0)
        self._pending = step, self._steps, _Sums(reported)
        self._steps, self._before, self._quiet = 0, now, None

    def _pack(self, seconds: float) -> torch.Tensor:
        reports: list[tuple[str, float | torch.Tensor]] = [("seconds", seconds)]
        for member in self._members:
            reports += member.report().items()
        reports.sort(key=lambda item: (not _is_on_gpu(item[1]), not _is_vector(item[1])))
        self._check([(name, len(one) if _is_vector(one) else None) for name, one in reports])
        values = [value for _, value in reports]
        on_gpu = [value.double().reshape(-1) for value in values if _is_on_gpu(value)]
        on_host = [one for one in values if _is_vector(one) and not _is_on_gpu(one)]
        numbers = [float(one) for one in values if not (_is_vector(one) or _is_on_gpu(one))]
        host = torch.cat([*on_host, torch.tensor(numbers, dtype=torch.float64)])
        host = upload(host, self._device)
        return torch.cat([*on_gpu, host]) if on_gpu else host

    def _check(self, layout: list[tuple[str, int | None]]) -> None:
        if layout == self._layout:
            return
        names = Counter(name for name, _ in layout)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"two members of the step report {', '.join(twice)}: rename one")
        before, now = ([(name, size is None) for name, size in one] for one in (self._layout, layout))
        if before and before != now:
            changed = ", ".join(sorted({name for name, _ in {*before} ^ {*now}}))
            raise ConfigError(
                f"the members of the step report {changed or 'their numbers in another order'} only "
                "in some steps, or as a number and as a vector; report the same in every step"
            )
        self._layout = layout

    def _unpack(self, sums: list[float]) -> dict[str, Any]:
        agreed: dict[str, Any] = {}
        at = 0
        for name, size in self._layout:
            agreed[name] = sums[at] if size is None else sums[at : at + size]
            at += 1 if size is None else size
        return agreed


def _is_on_gpu(value: float | torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_vector(value: float | torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim > 0


class _Sums:
    """A vector that is being summed over the ranks."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._work = dist.all_reduce(vector, async_op=True) if dist.get_world_size() > 1 else None
        if self._work and vector.is_cuda:
            self._work.wait()  # with NCCL the stream waits, not this thread
            self._work = None
        self._copied = Copied(vector)

    @clock.waiting
    @doing("waiting for the other ranks")
    def read(self) -> list[float]:
        if self._work:
            self._work.wait()
        return list(self._copied.read())
