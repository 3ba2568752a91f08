"""Say in words which rank is late in which phase, and whose memory grows. No torch."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollcall.records.phases import Phases

PHRASES = {
    0: ("reading data", "its data wait"),
    1: ("forward", "its forward pass"),
    2: ("backward", "its backward pass"),
    4: ("the optimizer", "its optimizer"),
    5: ("what it does between the passes", "the rest of its step"),
}
"""Phases that a rank spends alone, by their place: where it is late, and what is normal or not."""
OWN = list(PHRASES)
SHARE, LEAST = 0.1, 0.001
"""A rank is late in a phase if it takes longer by this share of a step and this many seconds."""
MANY = 32
"""Ranks above which one of them does not change the median."""
IN_A_ROW = 4
"""Windows in a row after which a rank is named, so that a short disturbance does not count."""
OFTEN = 0.3
"""The share of their steps in which it must be late: on busy CPUs single steps take long."""
SAMPLES = 32
"""Readings of a rank's memory that are compared, without the first quarter: a run warms up."""
GROWTH = 0.05, 32e6
"""Memory grows if it gained at least this share of what it was, and this many bytes."""


class Window(NamedTuple):
    """The phases of all ranks in some steps."""

    step: int  # the newest
    steps: int
    phases: np.ndarray  # (ranks, 6): mean seconds of a step
    late: np.ndarray  # (ranks, 6): steps above the limits of the window before


def others_median(values: np.ndarray) -> np.ndarray:
    """Return for each rank the median of the other ranks' values: (ranks, phases) to the same."""
    if not 1 < len(values) <= MANY:
        return np.broadcast_to(_median(values), values.shape)
    return np.array([_median(np.delete(values, rank, axis=0)) for rank in range(len(values))])


def _median(values: np.ndarray) -> np.ndarray:
    # np.median would import numpy.ma on each forked rank.
    order, count = np.sort(values, axis=0), len(values)
    middle: np.ndarray = (order[(count - 1) // 2] + order[count // 2]) / 2
    return middle


def limits(phases: np.ndarray) -> np.ndarray:
    """Return the seconds above which a rank is late in a phase: (ranks, 6) to the same."""
    step = float(phases.sum(1).mean())
    return others_median(phases) + max(LEAST, SHARE * step)


class LateRanks:
    """Finds the rank for which the others wait, and the phase in which it is late.

    Waiting for other ranks is a separate phase, so it cannot hide a rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names  # such as "rank 5 (node07, gpu 1)"
        self._row: deque[Window] = deque(maxlen=IN_A_ROW)
        shape = len(names), len(OWN)
        self._times, self._told = np.zeros(shape, int), np.zeros(shape, bool)  # windows in a row
        self.slowest: tuple[int, float] | None = None  # a rank, and its own time / the others'

    def add(self, window: Window) -> dict[str, Any] | None:
        """Return fields of an event if a rank has become a straggler with this window."""
        self._row.append(window)
        if len(self._names) == 1:
            return None
        own = window.phases[:, OWN]
        total = own.sum(1)
        usual = others_median(total[:, None])[:, 0]
        worst = int(total.argmax())
        self.slowest = (worst, float(total[worst] / usual[worst])) if usual[worst] else None
        over = own - limits(window.phases)[:, OWN]
        self._times = np.where(over > 0, self._times + 1, 0)
        self._told &= self._times > 0
        steps = sum(one.steps for one in self._row)
        often = sum(one.late[:, OWN] for one in self._row) >= OFTEN * steps
        new = (self._times >= IN_A_ROW) & often & ~self._told
        if not new.any():
            return None
        rank, place = np.unravel_index(int(np.where(new, over, 0).argmax()), over.shape)
        self._told[rank, place] = True
        return self._verdict(int(rank), OWN[int(place)])

    def _verdict(self, rank: int, phase: int) -> dict[str, Any]:
        steps = sum(window.steps for window in self._row)
        late = int(sum(window.late[rank, phase] for window in self._row))
        means = np.average([one.phases for one in self._row], 0, [one.steps for one in self._row])
        excess = (means - others_median(means))[rank]
        other = next(place for place in OWN if place != phase)
        state = "is late too" if means[rank, other] > limits(means)[rank, other] else "is normal"
        seconds = float(excess[phase])
        text = (
            f"{self._names[rank]} is {1000 * seconds:.{0 if seconds > 0.01 else 1}f} ms late in "
            f"{PHRASES[phase][0]} in {late} of the last {steps} steps; {PHRASES[other][1]} {state}"
        )
        found: dict[str, Any] = {"text": text, "rank": rank, "phase": Phases.PHASES[phase]}
        found["times"] = round(self.slowest[1], 2) if self.slowest else 1.0
        return found | {"seconds": round(seconds, 6), "late": late, "steps": steps}


class GrowingMemory:
    """Finds ranks whose memory grows from step to step and does not stop."""

    def __init__(self, names: Sequence[str], what: str) -> None:
        self._names, self._what = names, what
        self._readings: list[tuple[int, np.ndarray]] = []
        self._every = self._seen = 1  # every n-th window is kept
        self._told = np.zeros(len(names), bool)

    def add(self, step: int, sizes: np.ndarray) -> dict[str, Any] | None:
        """Note the bytes of each rank; return fields of an event if one began to grow."""
        self._seen -= 1
        if self._seen:
            return None
        self._seen = self._every
        self._readings.append((step, sizes))
        if len(self._readings) < SAMPLES:
            return None
        kept = self._readings[SAMPLES // 4 :]
        self._readings, self._every = self._readings[1::2], 2 * self._every
        steps, table = np.array([at for at, _ in kept]), np.array([one for _, one in kept])
        gained = table[-1] - table[0]
        rises = (np.diff(table, axis=0) > 0).mean(0)
        half = table[len(table) // 2]
        grows = (gained > np.maximum(GROWTH[0] * table[0], GROWTH[1])) & (rises > 0.7)
        grows &= (table[-1] - half > gained / 4) & ~self._told
        if not grows.any():
            return None
        self._told |= grows
        rank = int(np.where(grows, gained, -1).argmax())
        pace = gained[rank] / max(1, steps[-1] - steps[0])
        many = f" and of {grows.sum() - 1} more ranks" if grows.sum() > 1 else ""
        text = (
            f"the {self._what} of {self._names[rank]}{many} grows by {pace / 1e6:.3g} MB a step, "
            f"{gained[rank] / 1e6:,.0f} MB since step {steps[0]}: it keeps something"
        )
        return {"text": text, "rank": rank, "bytes_per_step": round(float(pace))}
