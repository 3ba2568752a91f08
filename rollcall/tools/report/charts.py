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

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import figure, listed
from rollcall.records.phases import Phases
from rollcall.tools.report.curves import CELLS, Array, Curve, Timing, thin
from rollcall.tools.report.story import Mark, Points

MISSING = "a report needs the package '{}': pip install matplotlib jinja2"
try:
    import matplotlib as matplotlib
    from matplotlib.figure import Figure as Figure
    from matplotlib.ticker import (
        Formatter,
        LogFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        ScalarFormatter,
    )
except ModuleNotFoundError as error:
    raise RefusedError(MISSING.format("matplotlib")) from error

COLOURS = ("card", "ink", "muted", "line", "bad", "warn", *(f"c{number}" for number in range(8)))
"""Variables of the page's style sheet."""
MARKED = "#0a0b{:02x}"
"""A placeholder for a colour until the SVG is written, by its place in COLOURS."""
PHASES = ("c4", "c5", "c0", "c1", "c2", "muted")
"""Colours of the phases of a step, in the order of `Phases.PHASES`."""
LINES = {
    "restart": ("c3", "--"),
    "done again": ("c3", ""),
    "signal": ("warn", ":"),
    "fault": ("bad", "-"),
}
"""Colour and dashes of the marks that are lines; checkpoints are ticks at the bottom."""
NARROW, WIDE = (400, 225), (860, 270)
"""Sizes of a chart, in the units of its text of 11 points: for a column, and for the page."""
MARGINS = (46, 12, 10, 36)
"""Space for text at the left, the right, the top and the bottom."""
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "axes.linewidth": 0.8,
}
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
"""Units of the numbers at an axis."""
SPREAD, EXTREMES = "one standard deviation over the seeds", "the extremes of neighbouring steps"
MANY = 8
"""More curves than this share one colour; only the best one stands out."""
MOST_MARKS, MOST_VALUES = 300, 12
"""Marks in a chart, and curves whose values the script shows."""
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
    def is_narrow(self) -> bool:
        """True if it is drawn for a column only."""
        return len(self.pictures) == 1


def colour(name: str) -> str:
    """Return the placeholder for a colour of the page until the SVG is written."""
    return MARKED.format(COLOURS.index(name))


def curves(
    title: str,
    named: Sequence[tuple[str, str, Curve]],
    marks: Sequence[Mark],
    last: float,
    is_wide: bool = False,
    may_be_log: bool = False,
    band: str = EXTREMES,
) -> Chart:
    """Draw curves over steps; `named` has a name, a colour and the points of each.

    Args:
        last: the last step of the axis, which charts of one run share.
        is_wide: whether it is drawn for the width of the page too, with all marks.
        may_be_log: whether the axis is logarithmic if the values need it.
        band: what a band of these curves shows.
    """
    low = min(np.nanmin(curve.low) for *_, curve in named)
    high = max(np.nanmax(curve.high) for *_, curve in named)
    is_log = may_be_log and low > 0 and high / low > 20
    first = float(min(curve.x[0] for *_, curve in named))
    shown = _apart(marks, first, last)

    def paint(axes: Any) -> None:
        for _, name, curve in reversed(named):
            shade = colour(name)
            if curve.is_band:
                axes.fill_between(curve.x, curve.low, curve.high, color=shade, alpha=0.22, lw=0)
            dot = "o" if len(curve.x) < 40 else ""
            axes.plot(curve.x, curve.y, color=shade, lw=1.6, marker=dot, ms=3)
        if is_log:
            axes.set_yscale("log")
        for mark in shown:
            if mark.kind == "done again":
                axes.axvspan(mark.since, mark.step, color=colour("c3"), alpha=0.25, lw=0)
            elif mark.kind in LINES:
                shade, dashes = LINES[mark.kind]
                axes.axvline(mark.step, color=colour(shade), ls=dashes, lw=1)
            elif mark.kind == "checkpoint":
                axes.axvline(mark.step, ymax=0.04, color=colour("muted"), lw=1)
        axes.set_xlim(first - (first == last), last + (first == last))
        axes.set_xlabel("step")

    words = listed([describe(name, curve) for name, _, curve in named], MANY)
    notes = f"The band shows {band}. " if any(curve.is_band for *_, curve in named) else ""
    notes += "Logarithmic axis." if is_log else ""
    legend = [(shade, name) for name, shade, _ in named] if len(named) > 1 else []
    if len(named) > MANY:
        legend = [*(entry for entry in legend if entry[0] == "c1"), ("muted", "other runs")]
    if is_wide:
        kinds = {mark.kind for mark in shown}
        legend += [(LINES[kind][0], kind) for kind in LINES if kind in kinds]
        legend += [("muted", "checkpoint (ticks)")] if "checkpoint" in kinds else []
    series = []
    for name, _, curve in named[:MOST_VALUES]:
        keys = ("x", "y", "low", "high") if curve.is_band else ("x", "y")
        series.append({"n": name, **{key: _short(getattr(curve, key)) for key in keys}})
    data = {"series": series, "marks": [[m.step, m.text] for m in shown] if is_wide else []}
    return _drawn(title, notes, paint, data, legend, is_wide, spoken=words)


def describe(name: str, curve: Curve) -> str:
    """Say in words what a curve shows."""
    (start, from_), (end, to) = curve.ends
    low, high = figure(np.nanmin(curve.low)), figure(np.nanmax(curve.high))
    ends = f"{figure(from_)} at step {start:,.0f} to {figure(to)} at step {end:,.0f}"
    return f"{name}: {ends}; lowest {low}, highest {high}"


def heat_map(timing: Timing) -> Chart:
    """Draw the time of a step by rank and step, as far as a rank does not wait for others."""
    values = timing.own * 1e3
    row, column = divmod(int(np.nanargmax(values)), values.shape[1])
    ranks = [row * timing.group, min((row + 1) * timing.group, timing.ranks) - 1]
    where = f"rank {ranks[0]} to {ranks[1]}" if ranks[1] > ranks[0] else f"rank {ranks[0]}"
    words = (
        f"Milliseconds of a step of each of {timing.ranks:,} ranks, without communication, in "
        "which ranks wait for each other. The slowest is "
        f"{where} at step {timing.steps[column]:,.0f}, {figure(values[row, column])} ms."
    )
    if timing.group > 1:
        words += f" A row shows the slowest of {timing.group} ranks."
    if timing.every > 1:
        words += f" One of {timing.every} measurements was read, because the file is large."
    data = {"group": timing.group, "ranks": timing.ranks, "unit": " ms"}
    return _grid("Step time by rank", words, values, timing.steps, data)


def by_part(title: str, parts: dict[str, Points], part: str) -> Chart:
    """Draw a number by part, such as a layer, and step: the largest of the steps of a cell."""
    names = sorted(parts, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)])
    known = [thin(parts[name], CELLS[1] // 2) for name in names]
    steps = max((curve.x for curve in known), key=len)
    values = np.stack([np.interp(steps, c.x, c.high, np.nan, np.nan) for c in known])
    words = f"Rows are {part}s, {names[0]} at the top. The largest value is "
    words += f"{figure(float(np.nanmax(values)))}."
    data = {"group": 1, "ranks": len(names), "unit": "", "names": names, "row": part}
    return _grid(f"{title} by {part}", words, values, steps, data)


def _grid(title: str, words: str, values: Array, steps: Array, data: dict[str, Any]) -> Chart:
    """Draw a heat map of values (rows, steps), of which the largest stands out."""
    low, high = map(float, np.nanpercentile(values, (0, 99.5)))
    high = max(high, 1.5 * low, 1e-9)  # or noise would look like a difference

    def paint(axes: Any) -> None:
        box = (steps[0], max(steps[-1], steps[0] + 1), data["ranks"] - 0.5, -0.5)
        how = {"aspect": "auto", "interpolation": "none", "cmap": "cividis"}
        axes.imshow(np.clip(values, low, high), extent=box, vmin=low, vmax=high, **how)
        axes.grid(visible=False)
        axes.set(xlabel="step", ylabel=data.get("row", "rank"))
        axes.yaxis.get_major_locator().set_params(integer=True)

    data |= {"grid": [*map(_short, values)], "steps": _short(steps)}
    data["scale"] = [f"{figure(low)}{data['unit']}", f"{figure(high)}{data['unit']} or more"]
    height = min(WIDE[1], 70 + 26 * len(values))
    return _drawn(title, words, paint, data, [], True, height)


def phases(timing: Timing) -> list[Chart]:
    """Draw the time of a step by phase: over the steps, and of each rank."""
    names, total = Phases.PHASES, timing.by_rank.mean(1)
    shares = zip(names, total / max(total.sum(), 1e-12), strict=True)
    words = f"Mean of all ranks: {', '.join(f'{name} {part:.0%}' for name, part in shares)}."

    def over_time(axes: Any) -> None:
        axes.stackplot(timing.steps, timing.over_time * 1e3, colors=[*map(colour, PHASES)], lw=0)
        axes.set_xlim(timing.steps[0], max(timing.steps[-1], timing.steps[0] + 1))
        axes.set_xlabel("step")

    def by_rank(axes: Any) -> None:
        bottom = np.zeros(timing.by_rank.shape[1])
        for shade, times in zip(PHASES, timing.by_rank * 1e3, strict=True):
            _bars(axes, timing, times, shade, bottom)
            bottom = bottom + times

    steps, ranks = (_short(values) for values in (timing.steps, timing.first_ranks))
    over, of = (_series(names, values * 1e3) for values in (timing.over_time, timing.by_rank))
    legend = list(zip(PHASES, names, strict=True))
    first, second = "Milliseconds of a step by phase", "Milliseconds of a step by rank and phase"
    return [
        _drawn(first, words, over_time, {"series": over, "x": steps}, legend),
        _drawn(second, "", by_rank, {"series": of, "x": ranks, "of": "rank"}, legend),
    ]


def memory(timing: Timing) -> Chart:
    """Draw the greatest number of bytes that each rank has used."""
    names, values = list(timing.memory), [value / 1e9 for value in timing.memory.values()]

    def paint(axes: Any) -> None:
        _bars(axes, timing, values[0], "c0")
        for shade, dot, more in zip(("c1", "c2"), ("_", "."), values[1:], strict=False):
            axes.plot(timing.first_ranks, more, dot, color=colour(shade), ms=9, mew=2)

    words = []
    for name, value in zip(names, values, strict=True):
        rank = value.argmax() * timing.group
        extremes = f"{figure(value.min())} to {figure(value.max())} GB"
        words.append(f"{name}: {extremes}, most on rank {rank}")
    data = {"series": _series(names, values), "x": _short(timing.first_ranks), "of": "rank"}
    legend = list(zip(("c0", "c1", "c2"), names, strict=False))
    return _drawn("Memory by rank, GB", "", paint, data, legend, spoken=f"{'; '.join(words)}.")


def parallel(titles: Sequence[str], rows: Sequence[Sequence[str]], best: int, words: str) -> Chart:
    """Draw a sweep as parallel coordinates: an axis for each column, a line for each run."""
    heights = [_heights(column) for column in zip(*rows, strict=True)]

    def paint(axes: Any) -> None:
        for axis, column in enumerate(heights):
            axes.axvline(axis, color=colour("line"), lw=1)
            written: list[float] = []
            # The best run's text comes first.
            order = sorted(range(len(rows)), key=lambda run: (run != best, column[run]))
            for height, row in ((column[run], rows[run]) for run in order):
                if all(abs(height - other) > 0.09 for other in written):
                    written.append(height)
                    how = {"size": 9, "color": colour("ink"), "textcoords": "offset points"}
                    how["bbox"] = {"facecolor": colour("card"), "lw": 0, "pad": 1.5, "alpha": 0.8}
                    axes.annotate(row[axis][:14], (axis, height), xytext=(5, 2), **how)
        for number in sorted(range(len(rows)), key=lambda run: run == best):
            shade, width, alpha = ("c1", 2.6, 1.0) if number == best else ("c0", 1.0, 0.55)
            line = [column[number] for column in heights]
            axes.plot(line, color=colour(shade), lw=width, alpha=alpha)
        axes.set_xticks(range(len(titles)), [title.rpartition(".")[2] for title in titles])
        axes.set(yticks=[], xlim=(-0.1, len(titles) - 0.55), ylim=(-0.08, 1.12))
        axes.grid(visible=False)

    legend = [("c1", "best"), ("c0", "other runs")]
    return _drawn("Parameters and results", words, paint, {}, legend, True)


def _heights(values: Sequence[str]) -> list[float]:
    """Return places between 0 and 1: of numbers by their size, of words by their order."""
    try:
        numbers = [float(value.replace(",", "")) for value in values]
        if min(numbers) > 0 and max(numbers) / min(numbers) >= 5:
            numbers = [math.log(number) for number in numbers]
    except ValueError:
        order = sorted(set(values))
        numbers = [float(order.index(value)) for value in values]
    low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low) if high > low else 0.5 for number in numbers]


def _bars(axes: Any, timing: Timing, values: Any, shade: str, bottom: Any = 0) -> None:
    width = timing.group * (0.8 if len(values) <= 32 else 1.0)
    axes.bar(timing.first_ranks, values, width, bottom=bottom, color=colour(shade), lw=0)
    axes.set_xlabel("rank")


def set_ticks(axes: Any) -> None:
    """Set the numbers at both axes; a logarithmic one has several also within a decade."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
        # Others are names.
        if isinstance(axis.get_major_formatter(), ScalarFormatter | LogFormatter):
            axis.set_major_formatter(_Ticks())


def _series(names: Sequence[str], values: Any) -> list[dict[str, Any]]:
    return [{"n": name, "y": _short(value)} for name, value in zip(names, values, strict=True)]


def _apart(marks: Sequence[Mark], first: float, last: float) -> list[Mark]:
    """Return the marks that can be distinguished, one of each kind in a small range of steps."""
    unit = max(last - first, 1) / MOST_MARKS
    inside = [mark for mark in marks if first <= mark.step <= last]
    return list({(mark.kind, int(mark.step / unit)): mark for mark in inside}.values())


def _short(values: Any) -> list[float | None]:
    """Return six significant digits of each number, for the page."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _drawn(
    title: str,
    words: str,
    paint: Callable[[Any], None],
    data: dict[str, Any],
    legend: list[tuple[str, str]],
    is_wide: bool = False,
    most: int = 1000,  # height
    spoken: str = "",  # what the picture shows, for readers that do not see it
) -> Chart:
    sizes = (WIDE, NARROW) if is_wide else (NARROW,)
    label = f"{title}. {spoken}".rstrip()
    pictures = [_svg(label, width, min(height, most), paint) for width, height in sizes]
    return Chart(title, words, pictures, data, legend)


def _svg(title: str, width: int, height: int, paint: Callable[[Any], None]) -> str:
    """Draw one picture; return its SVG, with colours of the page and no ids but its own."""
    left, right, top, bottom = MARGINS
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": f"{next(_numbers)}"}):
        drawn = Figure(figsize=(width / 72, height / 72), dpi=72)
        inner = (1 - (left + right) / width, 1 - (top + bottom) / height)
        axes = drawn.add_axes((left / width, bottom / height, *inner))
        axes.grid(visible=True, color=colour("line"), lw=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        paint(axes)
        set_ticks(axes)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(colour("line"))
        axes.tick_params(labelcolor=colour("muted"), length=0, which="both")
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(color=colour("muted"), size=10)
        low, high = axes.get_xlim()
        written = io.StringIO()
        drawn.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", written.getvalue(), flags=re.S)
    svg = re.sub(r' id="[A-Za-z.0-9]+_\d+"', "", svg)  # other pictures have the same ones
    svg = re.sub(r"#0a0b([0-9a-f]{2})", lambda match: f"var(--{COLOURS[int(match[1], 16)]})", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    box = f"{left} {top} {width - right} {height - bottom} {low:.10g} {high:.10g}"
    start = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
    start += f'data-box="{box}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return start + re.sub(r"\n\s*", "\n", svg.partition(">")[2])


class _Ticks(Formatter):
    """Numbers at an axis: as short as they can be, all with the same unit and decimals."""

    def __call__(self, value: float, _: float | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the text of each tick; those of a logarithmic axis have nothing in common."""
        axis: Any = self.axis
        if axis is not None and axis.get_scale() == "log":
            return [_same([value])[0] for value in values]
        return _same(values)


def _same(values: Sequence[float]) -> list[str]:
    largest = max(map(abs, values), default=0.0)
    size, unit = next((entry for entry in UNITS if largest >= max(entry[0], 1e4)), (1.0, ""))
    for decimals in range(5):
        texts = [f"{value / size:.{decimals}f}" for value in values]
        if all(
            abs(float(text) * size - value) <= 1e-6 * largest
            for text, value in zip(texts, values, strict=True)
        ):
            return [f"{text}{unit}" for text in texts]
    power = math.floor(math.log10(largest))
    return [f"{value / 10**power:.4g}e{power}" if value else "0" for value in values]
