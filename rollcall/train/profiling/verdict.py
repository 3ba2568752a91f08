"""Find ranks that are late in a phase. No torch."""

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
"""Phases without communication, by their column: words for lateness, and subject of a sentence."""
SOLO_PHASES = list(PHRASES)
MIN_SHARE, MIN_SECONDS = 0.1, 0.001
"""A rank is late in a phase if it takes longer by this share of a step and this many seconds."""
LARGE_WORLD = 32
"""Ranks above which a single rank does not change the median."""
IN_A_ROW = 4
"""Windows in a row after which a rank is named, so that a short disturbance does not count."""
MIN_LATE_STEPS = 0.3
"""The share of these windows' steps that must be late: on busy CPUs single steps take long."""


class Window(NamedTuple):
    """The phases of all ranks in some steps."""

    step: int  # the newest
    steps: int
    phases: np.ndarray  # (ranks, 6): mean seconds of a step
    late: np.ndarray  # (ranks, 6): steps above the limits of the window before


def others_median(values: np.ndarray) -> np.ndarray:
    """Return for each rank the median of the other ranks' values: (ranks, phases) to the same."""
    if not 1 < len(values) <= LARGE_WORLD:
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
    return others_median(phases) + max(MIN_SECONDS, MIN_SHARE * step)


class LateRanks:
    """Finds the rank for which the others wait, and the phase in which it is late."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names  # such as "rank 5 (node07, gpu 1)"
        self._windows: deque[Window] = deque(maxlen=IN_A_ROW)
        shape = len(names), len(SOLO_PHASES)
        self._times = np.zeros(shape, int)  # windows in a row
        self._reported = np.zeros(shape, bool)
        self.slowest: tuple[int, float] | None = None  # a rank, and its own time / the others'

    def add(self, window: Window) -> dict[str, Any] | None:
        """Return fields of an event if a rank has become a straggler with this window."""
        self._windows.append(window)
        if len(self._names) == 1:
            return None
        seconds = window.phases[:, SOLO_PHASES]
        total = seconds.sum(1)
        usual = others_median(total[:, None])[:, 0]
        worst = int(total.argmax())
        self.slowest = (worst, float(total[worst] / usual[worst])) if usual[worst] else None
        over = seconds - limits(window.phases)[:, SOLO_PHASES]
        self._times = np.where(over > 0, self._times + 1, 0)
        self._reported &= self._times > 0
        steps = sum(window.steps for window in self._windows)
        late_steps = sum(window.late[:, SOLO_PHASES] for window in self._windows)
        is_often = late_steps >= MIN_LATE_STEPS * steps
        new = (self._times >= IN_A_ROW) & is_often & ~self._reported
        if not new.any():
            return None
        rank, column = np.unravel_index(int(np.where(new, over, 0).argmax()), over.shape)
        self._reported[rank, column] = True
        return self._verdict(int(rank), SOLO_PHASES[int(column)])

    def _verdict(self, rank: int, phase: int) -> dict[str, Any]:
        steps = sum(window.steps for window in self._windows)
        late = int(sum(window.late[rank, phase] for window in self._windows))
        counts = [window.steps for window in self._windows]
        means = np.average([window.phases for window in self._windows], 0, counts)
        excess = (means - others_median(means))[rank]
        other = next(solo for solo in SOLO_PHASES if solo != phase)
        state = "is late too" if means[rank, other] > limits(means)[rank, other] else "is normal"
        seconds = float(excess[phase])
        text = (
            f"{self._names[rank]} is {1000 * seconds:.{0 if seconds > 0.01 else 1}f} ms late in "
            f"{PHRASES[phase][0]} in {late} of the last {steps} steps; {PHRASES[other][1]} {state}"
        )
        times = round(self.slowest[1], 2) if self.slowest else 1.0
        fields = {"text": text, "rank": rank, "phase": Phases.PHASES[phase], "times": times}
        return {**fields, "seconds": round(seconds, 6), "late": late, "steps": steps}
