"""Charts as SVG by matplotlib, in colours that the page chooses for light and dark."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from typing import Any

import numpy as np

from rollcall.launch.report.curves import Array, Curve, Timing
from rollcall.launch.report.story import Mark, figure
from rollcall.records.phases import Phases
from rollcall.refusal import RefusedError
from rollcall.text import listed

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    raise RefusedError(
        "a report needs the package 'matplotlib': pip install 'rollcall-train[report]'"
    ) from error

COLOURS = ("ink", "muted", "line", "bad", "warn", *(f"c{number}" for number in range(8)))
"""Variables of the page's style sheet."""
MARKED = "#0a0b{:02x}"
"""What stands for a colour until the SVG is written, by its place in COLOURS."""
PHASES = ("c4", "c5", "c0", "c1", "c2", "muted")
"""Colours of the phases of a step, in the order of `Phases.PHASES`."""
LINES = {"restart": ("c3", "--"), "signal": ("warn", ":"), "fault": ("bad", "-")}
"""Colour and dashes of the marks that are lines; checkpoints are ticks at the bottom."""
NARROW, WIDE = (400, 225), (860, 270)
"""Sizes of a chart, in the units of its text of 11 points: for a column, and for the page."""
MARGINS = (46, 12, 10, 36)
"""Space for text at the left, the right, the top and the bottom."""
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "path.simplify": True,
    "axes.linewidth": 0.8,
}
MOST_MARKS = 300
_numbers = count()


@dataclass(frozen=True)
class Chart:
    """A chart of the page."""

    title: str
    text: str  # what it shows, in words
    pictures: list[str]  # SVG: one, or a wide and a narrow one
    data: dict[str, Any]  # for the script that shows values
    legend: list[tuple[str, str]] = field(default_factory=list)  # colour and name

    @property
    def is_wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return len(self.pictures) > 1


def colour(name: str) -> str:
    """Return what stands for a colour of the page until the SVG is written."""
    return MARKED.format(COLOURS.index(name))


def curves(
    title: str,
    named: Sequence[tuple[str, str, Curve]],
    marks: Sequence[Mark] = (),
    is_wide: bool = False,
    may_be_log: bool = False,
) -> Chart:
    """Draw curves over steps; `named` has a name, a colour and the points of each.

    Args:
        is_wide: whether it is drawn for the width of the page too, with all marks.
        may_be_log: whether the axis is logarithmic if the values need it.
    """
    lows = np.concatenate([curve.low for *_, curve in named])
    highs = np.concatenate([curve.high for *_, curve in named])
    is_log = may_be_log and bool(lows.min() > 0 and highs.max() / lows.min() > 50)
    first = float(min(curve.x[0] for *_, curve in named))
    last = float(max(curve.x[-1] for *_, curve in named))

    def paint(axes: Any) -> None:
        for _, name, curve in reversed(named):
            if curve.is_band:
                axes.fill_between(
                    curve.x, curve.low, curve.high, color=colour(name), alpha=0.22, lw=0
                )
            dot = "o" if len(curve.x) < 40 else ""
            axes.plot(curve.x, curve.y, color=colour(name), lw=1.6, marker=dot, ms=3)
        if is_log:
            axes.set_yscale("log")
        for mark in _apart(marks, first, last):
            if mark.kind in LINES:
                shade, dashes = LINES[mark.kind]
                axes.axvline(mark.step, color=colour(shade), ls=dashes, lw=1)
            elif mark.kind == "checkpoint":
                axes.axvline(mark.step, ymax=0.04, color=colour("muted"), lw=1)
        axes.set_xlim(first, max(last, first + 1))
        axes.set_xlabel("step")

    series = [
        {
            "n": name,
            **{key: _short(getattr(curve, key)) for key in ("x", "y", "low", "high")},
        }
        if curve.is_band
        else {"n": name, "x": _short(curve.x), "y": _short(curve.y)}
        for name, _, curve in named
    ]
    near = [[mark.step, mark.text] for mark in _apart(marks, first, last)] if is_wide else []
    text = "; ".join(describe(name, curve) for name, _, curve in named)
    if len(named) > 2:
        text = listed([f"{name} {figure(curve.ends[1][1])}" for name, _, curve in named])
        text = f"Last values: {text}"
    notes = ["The band shows the extremes of neighbouring steps"] * any(
        c.is_band for *_, c in named
    )
    notes += ["logarithmic axis"] * is_log
    legend = [(shade, name) for name, shade, _ in named] if 1 < len(named) <= len(COLOURS) else []
    found = {mark.kind for mark in marks}
    if is_wide:
        legend += [(LINES[kind][0], kind) for kind in LINES if kind in found]
        legend += [("muted", "checkpoint (ticks)")] * ("checkpoint" in found)
    text = ". ".join([text, *(note[:1].upper() + note[1:] for note in notes)]) + "."
    sizes = (WIDE, NARROW) if is_wide else (NARROW,)
    data = {"series": series, "marks": near}
    return Chart(title, text, [_svg(title, size, paint) for size in sizes], data, legend)


def describe(name: str, curve: Curve) -> str:
    """Say in words what a curve shows."""
    (start, from_), (end, to) = curve.ends
    text = f"{name}: {figure(from_)} at step {start:,.0f}"
    if start == end:
        return text
    low, high = figure(curve.low.min()), figure(curve.high.max())
    return f"{text}, {figure(to)} at step {end:,.0f}; lowest {low}, highest {high}"


def heat_map(found: Timing) -> Chart:
    """Draw the time of a step by rank and step, as far as a rank does not wait for others."""
    values = found.own * 1e3
    known = values[~np.isnan(values)]
    low, high = (float(np.percentile(known, each)) for each in (0, 99.5))
    high = max(high, 1.5 * low, 1e-9)  # or noise would look like a difference
    row, column = divmod(int(np.nanargmax(values)), values.shape[1])
    height = min(WIDE[1], 70 + 26 * len(values))

    def paint(axes: Any) -> None:
        box = (found.steps[0], max(found.steps[-1], found.steps[0] + 1), found.ranks - 0.5, -0.5)
        axes.imshow(
            np.clip(values, low, high),
            aspect="auto",
            interpolation="none",
            cmap="cividis",
            vmin=low,
            vmax=high,
            extent=box,
        )
        axes.grid(visible=False)
        axes.set_xlabel("step")
        axes.set_ylabel("rank")
        axes.yaxis.get_major_locator().set_params(integer=True)

    where = f"rank {row * found.group}" + (
        f" to {min((row + 1) * found.group, found.ranks) - 1}" if found.group > 1 else ""
    )
    text = (
        f"Milliseconds of a step of each of {found.ranks:,} ranks, without communication, in which "
        f"ranks wait for each other: {figure(low)} (dark) to {figure(high)} ms or more (bright). "
        f"The slowest is {where} at step {found.steps[column]:,.0f}, "
        f"{figure(values[row, column])} ms."
    )
    if found.group > 1:
        text += f" A row stands for the slowest of {found.group} ranks."
    if found.every > 1:
        text += f" One of {found.every} measurements was read, because the file is large."
    title = "Step time by rank"
    grid = [_short(line) for line in values]
    data = {"grid": grid, "steps": _short(found.steps), "group": found.group, "ranks": found.ranks}
    sizes = [(width, min(height, most)) for width, most in (WIDE, NARROW)]
    return Chart(title, text, [_svg(title, size, paint) for size in sizes], data)


def phases(found: Timing) -> list[Chart]:
    """Draw the time of a step by phase: over the steps, and of each rank."""
    total = found.by_rank.mean(1)
    share = total / max(total.sum(), 1e-12)
    legend = list(zip(PHASES, Phases.PHASES, strict=True))
    text = "Mean of all ranks: " + ", ".join(
        f"{name} {part:.0%}" for name, part in zip(Phases.PHASES, share, strict=True)
    )

    def over_time(axes: Any) -> None:
        axes.stackplot(found.steps, found.over_time * 1e3, colors=[*map(colour, PHASES)], lw=0)
        axes.set_xlim(found.steps[0], max(found.steps[-1], found.steps[0] + 1))
        axes.set_xlabel("step")

    def by_rank(axes: Any) -> None:
        bottom = np.zeros(found.by_rank.shape[1])
        for shade, times in zip(PHASES, found.by_rank * 1e3, strict=True):
            _bars(axes, found, times, shade, bottom)
            bottom = bottom + times

    names = ["Milliseconds of a step by phase", "Milliseconds of a step by rank and phase"]
    series = [
        {"n": name, "x": _short(found.steps), "y": _short(times * 1e3)}
        for name, times in zip(Phases.PHASES, found.over_time, strict=True)
    ]
    return [
        Chart(
            names[0], text + ".", [_svg(names[0], NARROW, over_time)], {"series": series}, legend
        ),
        Chart(
            names[1],
            f"{text}.",
            [_svg(names[1], NARROW, by_rank)],
            {"series": _by_rank(found, Phases.PHASES, found.by_rank * 1e3), "of": "rank"},
            legend,
        ),
    ]


def memory(found: Timing) -> Chart | None:
    """Draw the greatest number of bytes that each rank has used; None if nobody measured it."""
    if not found.memory:
        return None
    names, values = list(found.memory), [each / 1e9 for each in found.memory.values()]

    def paint(axes: Any) -> None:
        _bars(axes, found, values[0], "c0", 0)
        places = np.arange(len(values[0])) * found.group
        for shade, dot, more in zip(("c1", "c2"), ("_", "."), values[1:], strict=False):
            axes.plot(places, more, dot, color=colour(shade), ms=9, mew=2)

    text = "; ".join(
        f"{name}: {figure(each.min())} to {figure(each.max())} GB, most on rank "
        f"{int(each.argmax()) * found.group}"
        for name, each in zip(names, values, strict=True)
    )
    title = "Memory by rank, GB"
    data = {"series": _by_rank(found, names, values), "of": "rank"}
    legend = list(zip(("c0", "c1", "c2"), names, strict=False))
    return Chart(title, text + ".", [_svg(title, NARROW, paint)], data, legend)


def parallel(titles: Sequence[str], rows: Sequence[Sequence[str]], best: int, text: str) -> Chart:
    """Draw a sweep as parallel coordinates: an axis for each column, a line for each run."""

    def paint(axes: Any) -> None:
        heights = [_heights([row[place] for row in rows]) for place in range(len(titles))]
        for place in range(len(titles)):
            axes.axvline(place, color=colour("line"), lw=1)
            marked = {heights[place][row]: rows[row][place] for row in range(len(rows))}
            for height in _spread(sorted(marked)):
                axes.annotate(
                    marked[height][:14],
                    (place, height),
                    xytext=(4, 2),
                    textcoords="offset points",
                    size=9,
                    color=colour("ink"),
                )
        for row in [*(each for each in range(len(rows)) if each != best), best]:
            shade, width = ("c1", 2.6) if row == best else ("c0", 1.0)
            line = [heights[place][row] for place in range(len(titles))]
            alpha = 1 if row == best else 0.55
            axes.plot(range(len(titles)), line, color=colour(shade), lw=width, alpha=alpha)
        axes.set_xticks(range(len(titles)), [title.rpartition(".")[2] for title in titles])
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(titles) - 0.55)
        axes.set_ylim(-0.08, 1.12)
        axes.grid(visible=False)

    title = "Parameters and results"
    legend = [("c1", "best"), ("c0", "other runs")]
    return Chart(title, text, [_svg(title, size, paint) for size in (WIDE, NARROW)], {}, legend)


def _heights(values: Sequence[str]) -> list[float]:
    """Return places between 0 and 1: of numbers by their size, of words by their order."""
    try:
        numbers = [float(value.replace(",", "")) for value in values]
        if min(numbers) > 0 and max(numbers) / min(numbers) > 20:
            numbers = [math.log(number) for number in numbers]
    except ValueError:
        order = sorted(set(values))
        numbers = [float(order.index(value)) for value in values]
    low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low) if high > low else 0.5 for number in numbers]


def _spread(heights: Sequence[float]) -> list[float]:
    """Return the heights that are far enough apart for text."""
    found: list[float] = []
    for height in heights:
        if not found or height - found[-1] > 0.09:
            found.append(height)
    return found


def _bars(axes: Any, found: Timing, values: Array, shade: str, bottom: Any) -> None:
    places = np.arange(len(values)) * found.group
    width = found.group * (0.8 if len(values) <= 32 else 1.0)
    axes.bar(places, values, width, bottom=bottom, color=colour(shade), lw=0)
    axes.set_xlabel("rank")


def _by_rank(found: Timing, names: Sequence[str], values: Any) -> list[dict[str, Any]]:
    places = _short(np.arange(len(values[0])) * float(found.group))
    return [
        {"n": name, "x": places, "y": _short(each)}
        for name, each in zip(names, values, strict=True)
    ]


def _apart(marks: Sequence[Mark], first: float, last: float) -> list[Mark]:
    """Return the marks that can be told apart, one of each kind in a small range of steps."""
    unit = max(last - first, 1) / MOST_MARKS
    inside = [mark for mark in marks if first <= mark.step <= last]
    return list({(mark.kind, int(mark.step / unit)): mark for mark in inside}.values())


def _short(values: Any) -> list[float | None]:
    """Return four significant digits of each number, for the page."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _svg(title: str, size: tuple[int, int], paint: Callable[[Any], None]) -> str:
    """Draw one picture; return its SVG, with colours of the page and no ids but its own."""
    width, height = size
    left, right, top, bottom = MARGINS
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": f"{next(_numbers)}"}):
        drawn = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
        box = (
            left / width,
            bottom / height,
            1 - (left + right) / width,
            1 - (top + bottom) / height,
        )
        axes = drawn.add_axes(box, facecolor="none")
        axes.grid(visible=True, color=colour("line"), lw=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
        axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
        paint(axes)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(colour("line"))
        axes.tick_params(color=colour("line"), labelcolor=colour("muted"), length=0, which="both")
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(color=colour("muted"), size=10)
        if axes.get_yscale() == "log":
            axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
            axes.yaxis.set_minor_formatter(lambda *_: "")
        low, high = axes.get_xlim()
        written = io.StringIO()
        drawn.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    text = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", written.getvalue(), flags=re.S)
    text = re.sub(r' id="[A-Za-z.0-9]+_\d+"', "", text)  # other pictures have the same ones
    text = re.sub(r"#0a0b([0-9a-f]{2})", lambda match: f"var(--{COLOURS[int(match[1], 16)]})", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"\n\s*", "\n", text)
    places = f"{left} {top} {width - right} {height - bottom} {low:.10g} {high:.10g}"
    start = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
    start += f'data-box="{places}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"^\s*<svg.*?>", lambda _: start, text, count=1, flags=re.S).strip()


def _tick(value: float) -> str:
    """Return a number at an axis, as short as it can be."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
