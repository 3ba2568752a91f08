"""Reduce curves and the times of ranks to what a chart can show, without losing extremes."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcall.records.phases import Phases
from rollcall.records.run_dir import RunDir
from rollcall.system.files import parse_lines, text_lines

Array = NDArray[np.float64]
COLUMNS = 300
"""A curve with more than twice this number of points gets this number."""
CELLS = (128, 120)
"""Most rows and columns of a heat map; each shows a group of ranks and steps."""
MOST_BYTES = 40_000_000
"""Bytes of phases.jsonl that are read; of a larger file, every second, third, ... line."""
MEMORY = {"memory": "peak in use", "reserved": "reserved by PyTorch", "host": "process on the host"}
"""The fields of `Phases` with bytes of each rank, and what they are called."""


class Curve(NamedTuple):
    """A curve; `low` and `high` are the extremes of the steps of a point, and NaN is a gap."""

    x: Array
    y: Array
    low: Array
    high: Array
    ends: tuple[tuple[float, float], tuple[float, float]]  # its first point and its last one

    @property
    def is_band(self) -> bool:
        """True if a point covers several steps."""
        return bool((self.low < self.high).any())


def thin(points: Sequence[tuple[int, float]], columns: int = COLUMNS) -> Curve:
    """Return at most 2 `columns` points, each the mean of a group of neighbours."""
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    y = np.where(np.isfinite(y), y, np.nan)
    ends = (points[0], points[-1])
    if len(x) <= 2 * columns:
        return Curve(x, y, y, y, ends)
    edges = np.linspace(0, len(x), columns + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    mean = np.add.reduceat(y / sizes.max(), starts) / sizes * sizes.max()
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    return Curve(x[starts + sizes // 2], mean, low, high, ends)


def mean(curves: Sequence[Any]) -> Curve | None:
    """Return the mean and its standard deviation where all have values; None if nowhere."""
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    if not len(x := x[(x >= first) & (x <= last)]):
        return None
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    y, spread = values.mean(0), values.std(0, ddof=1)
    return Curve(x, y, y - spread, y + spread, ((x[0], y[0]), (x[-1], y[-1])))


class Timing(NamedTuple):
    """The time of steps, by groups of ranks (rows) and of steps (columns)."""

    ranks: int
    group: int  # ranks in a row
    first_ranks: Array  # (rows,) the first rank of each row
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
    names = Phases.PHASES
    ranks = max(len(line.phases[name]) for line in lines for name in names)
    times = np.stack([_table(lines, [line.phases[n] for line in lines], ranks) for n in names])
    busy = times.sum(0) - times[names.index("communication")]
    columns, rows = _edges(len(lines), CELLS[1]), _edges(ranks, CELLS[0])
    weights = np.array([float(line.steps) for line in lines])[:, None]
    known = (~np.isnan(times) * weights).sum(1)
    of_rank = np.nansum(times * weights, 1) / np.maximum(known, 1)  # (phases, ranks)
    kinds = {title: [getattr(line, name) or [] for line in lines] for name, title in MEMORY.items()}
    memory = {name: _table(lines, kind, ranks) for name, kind in kinds.items() if any(kind)}
    peaks = {name: np.nan_to_num(values).max(axis=0) for name, values in memory.items()}
    peak, host = (peaks.get(MEMORY[name]) for name in ("memory", "host"))
    if peak is not None and host is not None and np.allclose(peak, host, rtol=0.05):
        del peaks[MEMORY["host"]]  # on CPUs it is the same memory
    return Timing(
        ranks,
        int(rows[1]),
        rows[:-1].astype(float),
        np.array([lines[end - 1].step for end in columns[1:]], dtype=float),
        np.fmax.reduceat(np.fmax.reduceat(busy.T, rows[:-1]), columns[:-1], axis=1),
        np.stack([_mean(np.nanmean(values, 1), columns) for values in times]),
        np.stack([_mean(values, rows) for values in of_rank]),
        {title: np.maximum.reduceat(values, rows[:-1]) for title, values in peaks.items()},
        every,
    )


def _lines(run: RunDir) -> tuple[list[Phases], int]:
    """Return the lines with all phases, and of how many one was read."""
    try:
        path = run.path / Phases.FILE
        every = 1 + path.stat().st_size // MOST_BYTES
        read = [
            Phases.parse(line) for line in parse_lines(islice(text_lines(path), 0, None, every))
        ]
    except OSError:
        return [], 1
    known = [line for line in read if line is not None and line.step >= 0 < line.steps]
    return [line for line in known if all(map(line.phases.get, Phases.PHASES))], every


def _table(lines: Sequence[Phases], values: Sequence[Sequence[float]], ranks: int) -> Array:
    """Return the values of each line and rank; NaN for ranks that a line does not have."""
    filled = np.full((len(lines), ranks), np.nan)
    for row, of_ranks in enumerate(values):
        filled[row, : len(of_ranks)] = np.clip(np.nan_to_num(of_ranks), 0, 1e15)[:ranks]
    return filled


def _edges(count: int, most: int) -> NDArray[np.int64]:
    """Return the starts of at most `most` groups of equal size, a power of two, and the end."""
    size = 1 << max(0, (count - 1) // most).bit_length()
    return np.array([*range(0, count, size), count])


def _mean(values: Array, edges: NDArray[np.int64]) -> Any:
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)
