"""Numbers that anybody may add to the log of a run: `rollcall.measure`, or `run.measure`.

Each rank adds up what is measured in a step, and rank 0 logs the values of all ranks. They travel
with the numbers of the members of the step, so they cost no further message.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Literal, get_args

import torch

from rollcall.records.run import LoggedStep
from rollcall.train.ranks.agreement import Number, one_slot
from rollcall.train.ranks.world import World

Reduce = Literal["mean", "sum", "max"]
"""The way to combine the values of a line: those of its steps, passes and ranks."""
TAKEN = {
    *("epoch", "lr", "grad_norm", "unreadable", "slowest_rank", "slowest_ratio"),
    *("tokens_per_second", "flops_per_second", "mfu", *LoggedStep.__dataclass_fields__),
}
"""Names of rollcall's own numbers in metrics.jsonl."""
Total = tuple[Number, Number]
"""The sum of some values and their number, or the largest of them and any number."""


class Measures:
    """The numbers measured on this rank and not yet exchanged."""

    def __init__(self) -> None:
        self._known: dict[str, Reduce] = {}  # the names that this rank has measured
        self._agreed: dict[str, Reduce] = {}  # those that all ranks know, in the same order
        self.step: dict[str, Total] = {}  # of the newest gradient
        self._before: dict[str, Total] = {}  # of steps before it
        self._line: dict[str, Total] = {}  # of all ranks, since the newest line of metrics.jsonl
        self._is_open = True

    def add(self, name: str, value: Number, reduce: Reduce = "mean") -> None:
        """Measure a value; raise ValueError if the name is taken or `reduce` is unknown."""
        if not self._is_open:
            return
        if name in TAKEN or name.startswith("val_") or not name.strip():
            raise ValueError(f"measure('{name}', …): the name is taken; choose another one")
        if reduce not in get_args(Reduce) or self._known.setdefault(name, reduce) != reduce:
            expected = "expected mean, sum or max, and the same each time"
            raise ValueError(f"measure('{name}', …, reduce='{reduce}'): {expected}")
        count = 1.0
        if isinstance(value, torch.Tensor):
            values, count = value.detach(), value.numel()
            value = values.amax() if reduce == "max" else values.sum(dtype=torch.float64)
        else:
            try:
                value = float(value)
            except (TypeError, ValueError):
                expected = f"expected a number or a tensor, got {value!r}"
                raise TypeError(f"measure('{name}', …): {expected}") from None
        _merge(self.step, name, (value, count), reduce)

    @contextmanager
    def of_process(self) -> Iterator[None]:
        """Let `rollcall.measure` add to these numbers while the context is open."""
        _of_process.append(self)
        try:
            yield
        finally:
            _of_process.remove(self)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Ignore what is measured in this context, such as an evaluation."""
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True

    def end_step(self, skipped: torch.Tensor) -> None:
        """Keep what was measured with a gradient, or forget it if its update is skipped."""
        for name, (value, count) in self.step.items():
            if skipped.is_cuda:  # which is not waited for
                none = math.nan if self._known[name] == "max" else 0.0
                value = torch.where(skipped, none, torch.as_tensor(value))
                count = torch.where(skipped, 0.0, torch.as_tensor(count))
            if skipped.is_cuda or not skipped:
                _merge(self._before, name, (value, count), self._known[name])
        self.step.clear()

    def take(self, world: World) -> list[Number]:
        """Return, and forget, what to sum over the ranks: for each name a sum and a count.

        A largest value has a place for each rank instead, of which this rank fills one; NaN stands
        for no value. Values of names that not all ranks know stay here.
        """
        numbers: list[Number] = []
        for name, reduce in self._agreed.items():
            if reduce == "max":
                value, _ = self._before.pop(name, (math.nan, 0))
                numbers += one_slot(value, world.rank, world.world_size)
            else:
                numbers += self._before.pop(name, (0.0, 0.0))
        return numbers

    @property
    def has_new(self) -> bool:
        """True if other ranks do not know all names that this rank has measured."""
        return self._known.keys() > self._agreed.keys()

    def agree(self, world: World) -> None:
        """Share all names with all ranks; the next `add` refuses another `reduce` for a name."""
        agreed: dict[str, Reduce] = {}
        has_new = world.gather(torch.tensor(self.has_new or world.is_main)).tolist()
        for rank in (rank for rank, is_new in enumerate(has_new) if is_new):
            agreed = {**world.broadcast(self._known, rank), **agreed}
        self._agreed = dict(sorted(agreed.items()))
        self._known |= self._agreed

    def settle(self, numbers: Sequence[Number], world: World) -> None:
        """Add up the sums over the ranks of what `take` returned, until they are logged."""
        sums = map(float, numbers)
        for name, reduce in self._agreed.items():
            if reduce == "max":
                values = [v for v in islice(sums, world.world_size) if not math.isnan(v)]
                total = max(values, default=0.0), float(len(values))
            else:
                total = next(sums), next(sums)
            if total[1]:
                _merge(self._line, name, total, reduce)

    def line(self) -> dict[str, float]:
        """Return, and forget, the value of each name for a line of metrics.jsonl."""
        totals, self._line = self._line, {}
        means = {name for name, reduce in self._agreed.items() if reduce == "mean"}
        counts = {name: float(count) if name in means else 1 for name, (_, count) in totals.items()}
        return {name: float(value) / counts[name] for name, (value, _) in totals.items()}


_of_process: list[Measures] = []


def measure(name: str, value: Number, reduce: Reduce = "mean") -> None:
    """Add a number to the next line of metrics.jsonl, from anywhere in a training step.

    So also to the console, the report and the loggers. Call it in a loss, in a model's forward
    method or in a callback, on any rank, as often as you like. The values of all steps,
    micro-batches and ranks since the line before become one. An evaluation does not count; without
    a run that trains in this process, nothing happens.

    Args:
        name: the name in metrics.jsonl, which must not be one of rollcall's own.
        value: a number; or a tensor, whose elements all count. A GPU is not waited for.
        reduce: mean, sum or max.

    Raises:
        ValueError: the name is taken, or was measured with another `reduce`.
    """
    measures = _of_process[-1] if _of_process else Measures()  # a mistake is one without a run, too
    measures.add(name, value, reduce)


def _merge(totals: dict[str, Total], name: str, more: Total, reduce: Reduce) -> None:
    """Add a total to the one of this name, without waiting for a GPU."""
    if name not in totals:
        totals[name] = more
        return
    (value, count), (other, others) = totals[name], more
    if reduce == "max":
        pair = torch.as_tensor(value), torch.as_tensor(other)
        totals[name] = torch.fmax(pair[0].to(pair[1].device), pair[1]), 1.0
    else:
        totals[name] = value + other, count + others
