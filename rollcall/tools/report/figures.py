"""A chart for a paper: curves of runs as SVG, PDF or PNG, with a mean over seeds."""

import io
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean, listed
from rollcall.system.files import write_atomic
from rollcall.tools.report import compare, curves
from rollcall.tools.report.charts import Figure, matplotlib, set_ticks
from rollcall.tools.report.curves import Array
from rollcall.tools.report.story import Story, axis_of

FORMATS = {".svg": "Date", ".pdf": "CreationDate", ".png": "Creation Time"}
"""The endings of a figure's file, and what each calls the date, which is left out."""
INCHES = (3.5, 2.4)
"""Size of a figure: the width of a column."""
# Text as outlines in SVG and as TrueType in PDF: type 3 fonts are refused by conferences.
SETTINGS: dict[Any, Any] = {
    **{"font.size": 8, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "svg.hashsalt": ""},
    **{"pdf.fonttype": 42, "svg.fonttype": "path", "text.parse_math": False},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5578f", "#e69f00", "#56b4e9", "#7a68b3", "#6b6b33")


class Line(NamedTuple):
    """A curve of one run, or the mean of several."""

    name: str
    x: Array
    y: Array
    spread: Array  # standard deviation over the runs; zeros for one run
    raw: Array  # of one run, before smoothing


def write(path: Path, stories: Sequence[Story], given: Namespace) -> None:
    """Draw the curves into the file.

    Raises:
        RefusedError: an option does not fit the runs, or the file cannot be written.
    """
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise RefusedError(f"--figure {path}: expected a name that ends in .svg, .pdf or .png")
    if not 0 <= given.smooth < 1:
        raise RefusedError(f"--smooth {given.smooth:g}: expected 0 to less than 1, such as 0.9")
    keys = given.curve.split(",")
    stories = [run for run in stories if run.drawn] or stories  # cells of a sweep may wait
    unit, per_unit = given.x, 1.0
    if given.x == "time":
        longest = max(max(run.times.values(), default=0.0) for run in stories)
        sizes = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
        per_unit, unit = next(entry[1:] for entry in sizes if longest >= entry[0])
    lines = [line for key in keys for line in _lines(stories, key, given)]
    if given.log and not any((line.y > 0).any() for line in lines):
        raise RefusedError(f"--log: {given.curve} has no value above 0; leave it out")
    codes = {run.facts.get("code", "") for run in stories} - {""}
    names = [*dict.fromkeys(map(axis_of, keys))]
    title = f"{', '.join(names)} of {listed([run.name for run in stories])}"
    title += f"; code {listed(sorted(codes))}" if codes else ""
    with matplotlib.rc_context(SETTINGS):
        drawn = Figure(figsize=INCHES, layout="constrained")
        axes = drawn.add_subplot()
        for line, colour in zip(lines, COLOURS * len(lines), strict=False):
            x, low, high = line.x / per_unit, line.y - line.spread, line.y + line.spread
            if line.spread.any():
                axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
            elif given.smooth:
                axes.plot(x, line.raw, color=colour, lw=0.5, alpha=0.3)
            dot = "o" if len(x) < 40 else ""
            axes.plot(x, line.y, color=colour, marker=dot, ms=2.5, label=line.name)
        if given.log:
            axes.set_yscale("log", nonpositive="mask")
        set_ticks(axes)
        axes.set(xlabel=unit, ylabel=names[0].lower() if len(names) == 1 else "")
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1 or lines[0].name not in names:
            axes.legend(frameon=False, fontsize=7)
        file = io.BytesIO()
        about = {"Title": title, FORMATS[ending]: None}
        drawn.savefig(file, format=ending[1:], dpi=300, metadata=about)
    try:
        write_atomic(path, file.getvalue())
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}; choose another name") from None


def _lines(stories: Sequence[Story], key: str, given: Namespace) -> list[Line]:
    """Return the curves of this key: one of each run, or of each group of runs."""
    groups = {run.name if len(stories) > 1 else "": [run] for run in stories}
    if given.over:
        by_keys = compare.grouped(stories, given.over).items()
        groups = {", ".join(keys): runs for keys, runs in by_keys}
    lines = []
    for name, runs in groups.items():
        title = axis_of(key) if "," in given.curve or not name else ""
        label = ", ".join(filter(None, (title, name)))
        label += f" (mean ± s.d. of {len(runs)})" if len(runs) > 1 else ""
        lines.append(_mean(label, [_line(label, run, key, given) for run in runs]))
    return lines


def _line(name: str, run: Story, key: str, given: Namespace) -> Line:
    points = run.drawn.get(key)
    if not points:
        hint = did_you_mean(key, run.drawn) or f"; it has {', '.join(run.drawn) or 'none'}"
        raise RefusedError(f"--curve {key}: run {run.name} has no such curve{hint}")
    x, raw = np.array(points, dtype=float).T
    if given.x == "samples":
        batch, _ = run.settings.get("data.global_batch", ("", ""))
        if not batch.isdecimal():
            raise RefusedError(f"--x samples: run {run.name} has no data.global_batch; use step")
        x = x * int(batch)
    elif given.x == "time":
        x = np.array([run.times.get(step, np.nan) for step, _ in points])
    raw = np.where(np.isfinite(raw), raw, np.nan)
    return Line(name, x, _smooth(raw, given.smooth), np.zeros(len(x)), raw)


def _smooth(values: Array, weight: float) -> Array:
    """Return the exponential moving average without a bias towards the first value."""
    total = norm = 0.0
    result = np.full(len(values), np.nan)
    for number, value in enumerate(values):
        if not np.isnan(value):
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        result[number] = total / norm if norm and not np.isnan(value) else np.nan
    return result


def _mean(name: str, lines: Sequence[Line]) -> Line:
    """Return the mean of runs where all have values, with their standard deviation."""
    if len(lines) == 1:
        return lines[0]
    curve = curves.mean(lines)
    if curve is None:
        raise RefusedError(f"{name}: the runs have no steps or times in common; use --x step")
    return Line(name, curve.x, curve.y, curve.high - curve.y, curve.y)
