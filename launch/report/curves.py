"""Reduce curves and the times of ranks to what a chart can show, without losing extremes."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcall.launch.report.story import LAST_STEP
from rollcall.records.files import parse_lines
from rollcall.records.phases import Phases
from rollcall.run_dir import RunDir

Array = NDArray[np.float64]
COLUMNS = 300
"""Points of a curve with more than twice as many."""
CELLS = (128, 120)
"""Most rows and columns of a heat map; each stands for a group of ranks and steps."""
MOST_BYTES = 40_000_000
"""How much of phases.jsonl is read; of a larger file every second, third, ... line is."""
MEMORY = {"memory": "peak in use", "reserved": "reserved by PyTorch", "host": "process on the host"}
"""The fields of `Phases` with bytes of each rank, and what they are called."""


class Curve(NamedTuple):
    """A curve; `low` and `high` are the extremes of the steps that a point stands for."""

    x: Array
    y: Array
    low: Array
    high: Array
    ends: tuple[tuple[float, float], tuple[float, float]]  # its first point and its last one

    @property
    def is_band(self) -> bool:
        """Whether points stand for several steps."""
        return bool((self.low < self.high).any())


def thin(points: Sequence[tuple[int, float]]) -> Curve:
    """Return at most 2 COLUMNS points, each the mean of a group of neighbours."""
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    ends = (points[0], points[-1])
    if len(x) <= 2 * COLUMNS:
        return Curve(x, y, y, y, ends)
    edges = np.linspace(0, len(x), COLUMNS + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    middle = x[starts + sizes // 2]
    mean = np.add.reduceat(y / sizes.max(), starts) / sizes * sizes.max()
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return Curve(middle, mean, low, high, ends)


class Timing(NamedTuple):
    """Where the time of steps went, by groups of ranks (rows) and of steps (columns)."""

    ranks: int
    group: int  # ranks in a row
    steps: Array  # (columns,) the newest step of each column
    own: Array  # (rows, columns) seconds of a step without communication: the slowest rank's
    over_time: Array  # (phases, columns) seconds, mean over the ranks
    by_rank: Array  # (phases, rows) seconds, mean over the steps
    memory: dict[str, Array]  # peak bytes, by name: (rows,)
    every: int  # of how many lines one was read


def timing(run: RunDir) -> Timing | None:
    """Read where the time of a run's steps went; None if nothing says so."""
    lines, every = _lines(run)
    if not lines:
        return None
    ranks = max(len(line.phases[name]) for line in lines for name in Phases.PHASES)
    times = np.full((len(lines), len(Phases.PHASES), ranks), np.nan)
    for place, line in enumerate(lines):
        for number, name in enumerate(Phases.PHASES):
            values = line.phases[name]
            times[place, number, : len(values)] = np.clip(values, 0, 1e9)
    columns = _edges(len(lines), CELLS[1])
    rows = _edges(ranks, CELLS[0])
    weights = np.clip([float(line.steps) for line in lines], 1, 1e12)
    own = times.sum(1) - times[:, Phases.PHASES.index("communication")]
    by_phase = [_mean(times[:, number], weights) for number in range(len(Phases.PHASES))]
    return Timing(
        ranks,
        int(np.diff(rows).max()),
        np.array([lines[end - 1].step for end in columns[1:]], dtype=float),
        _fold(np.fmax, _fold(np.fmax, own.T, rows), columns, axis=1),
        np.array([_average(times[:, n], columns) for n in range(len(by_phase))]),
        np.array([_average(phase, rows) for phase in by_phase]),
        {title: _peak(lines, name, rows) for name, title in MEMORY.items() if _has(lines, name)},
        every,
    )


def _lines(run: RunDir) -> tuple[list[Phases], int]:
    """Return the lines with all phases, in the order of steps, and of how many one was read."""
    path = run.path / Phases.FILE
    try:
        with path.open("rb") as file:
            every = 1 + path.stat().st_size // MOST_BYTES
            found = [Phases.parse(line) for line in parse_lines(islice(file, 0, None, every))]
    except OSError:
        return [], 1
    known = [
        line
        for line in found
        if line is not None
        and all(0 <= number < LAST_STEP for number in (line.step, line.steps))
        and all(line.phases.get(name) for name in Phases.PHASES)
    ]
    return sorted(known, key=lambda line: line.step), every


def _edges(count: int, most: int) -> NDArray[np.int64]:
    """Return where groups of equal size begin, and the end: at most `most` groups."""
    size = 1
    while size * most < count:
        size *= 2
    return np.array([*range(0, count, size), count])


def _fold(fold: Any, values: Array, edges: NDArray[np.int64], axis: int = 0) -> Array:
    return np.asarray(fold.reduceat(values, edges[:-1], axis=axis))


def _mean(values: Array, weights: Array) -> Array:
    """Return the mean over lines, (lines, ranks) to (ranks,), without the values that are NaN."""
    known = ~np.isnan(values)
    total = (known * weights[:, None]).sum(0)
    return np.asarray(np.nansum(values * weights[:, None], 0) / np.maximum(total, 1))


def _average(values: Array, edges: NDArray[np.int64]) -> Array:
    """Return the mean of each group along the first axis, and over the others."""
    flat = values.reshape(len(values), -1)
    known = _fold(np.add, (~np.isnan(flat)).sum(1).astype(float), edges)
    return np.asarray(_fold(np.add, np.nansum(flat, 1), edges) / np.maximum(known, 1))


def _has(lines: Iterable[Phases], name: str) -> bool:
    return any(getattr(line, name) for line in lines)


def _peak(lines: Sequence[Phases], name: str, rows: NDArray[np.int64]) -> Array:
    """Return the greatest number of bytes of each group of ranks."""
    peak = np.zeros(rows[-1])
    for line in lines:
        values = np.clip(getattr(line, name) or [], 0, 1e15)[: len(peak)]
        peak[: len(values)] = np.maximum(peak[: len(values)], values)
    return _fold(np.maximum, peak, rows)
