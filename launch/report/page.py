"""The report as one HTML file, which needs nothing else: the content of report.html."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcall.launch.report import charts, compare, curves
from rollcall.launch.report.charts import Chart
from rollcall.launch.report.story import Story, clock, figure, title_of, value_of
from rollcall.launch.runs.goodput import SHARES, Goodput
from rollcall.refusal import RefusedError
from rollcall.text import duration

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise RefusedError(charts.MISSING.format("jinja2")) from error

FIRST = ("loss", "val_loss", "val_accuracy", "grad_norm", "lr", "samples_per_second")
"""Curves in this order; others follow."""
TILES = ("val_accuracy", "val_loss", "loss", "samples_per_second")
"""Curves whose last value is shown at the top."""
MOST_CURVES = 12
DETAILED = 4
"""Of this many runs, the report shows where the time went, failures and configuration."""
OVERLAID = 24
"""The charts show this many runs, of a sweep the best."""
GOODPUT = ("c2", "muted", "c5", "c4", "c0", "c3", "warn", "bad", "c6", "line")
"""Colours of the shares of the wall clock, in the order of SHARES."""
STATES = {"done": "good", "running": "live", "pending": "warn", "failed": "bad", "lost": "bad"}
STYLE, SCRIPT = ((Path(__file__).parent / name).read_text() for name in ("page.css", "page.js"))
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
TEMPLATES.globals |= {
    "style": STYLE,
    "script": SCRIPT,
    "digest": base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    "states": STATES,
    "lines": {name: shade for name, (shade, _) in charts.LINES.items()},
}


def page(stories: Sequence[Story]) -> str:
    """Return the HTML of the report of these runs; at least one."""
    first, *others = stories = compare.ranked(stories)
    left_out = "The details of the other runs are in a report of each."
    if len(stories) > OVERLAID:
        left_out = f"The curves are of the first {OVERLAID} runs. {left_out}"
    return _filled(
        "report.html",
        is_one=not others,
        curves=_curves(stories),
        runs=stories[:DETAILED],
        left_out=[left_out] if len(stories) > DETAILED else [],
        **(_of_all(stories) if others else {"title": first.name, "lead": in_words(first)}),
    )


def listing(rows: Sequence[tuple[str, str, dict[str, str]]]) -> str:
    """Return the page of all runs; a row has the address, the name, and cells by column."""
    return _filled("list.html", title="Runs", rows=rows)


def _filled(template: str, **values: Any) -> str:
    text = TEMPLATES.get_template(template).render(values)
    return text.encode(errors="replace").decode()  # names of files are bytes, not always text


def _tiles(one: Story) -> dict[str, str]:
    """Return the figures at the top of a report of one run."""
    step, total = one.progress.step, one.progress.total
    tiles = {f"Steps, of {total:,}" if total else "Steps": "" if step is None else f"{step:,}"}
    known = [key for key in TILES if key in one.newest]
    known = [key for key in known if key != "loss" or "val_loss" not in known]
    tiles |= {title_of(key): value_of(key, one.newest[key]) for key in known}
    if one.goodput is not None:
        tiles["Goodput"] = f"{one.goodput.productive:.1%}"
        tiles["Wall clock"] = duration(one.goodput.wall)
    tiles["Ranks"] = one.facts.get("ranks", "")
    tiles["Attempts"] = str(one.condition.attempts or "")
    return tiles


def in_words(one: Story) -> str:
    """Say how a run stands, in a few sentences."""
    step, total = one.progress.step, one.progress.total
    of_total = f" of {total:,}" if total else ""
    text = "No step was logged" if step is None else f"Step {step:,}{of_total}"
    known = [key for key in TILES[:3] if key in one.newest][:2]
    figures = [f"{title_of(key).lower()} {value_of(key, one.newest[key])}" for key in known]
    text += f"; {', '.join(figures)}." if figures else "."
    if one.failures and one.condition.state in ("failed", "lost"):
        cause = one.failures[0].cause.what
        text += f" {cause[:1].upper()}{cause[1:]}."
    elif one.condition.is_live and one.progress.left:
        text += f" About {duration(one.progress.left)} left."
    elif one.condition.note and one.condition.state not in ("failed", "done"):
        text += f" {one.condition.note[:1].upper()}{one.condition.note[1:]}."
    restarts = sum(mark.kind == "restart" for mark in one.marks)
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"{text} It resumed {times}." if restarts else text


def _of_all(stories: Sequence[Story]) -> dict[str, Any]:
    """Return what compares the runs: the header, a table, and of a sweep parallel coordinates."""
    states = [each.condition.state for each in stories]
    names = [each.name for each in stories]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) + "."
    found, tables = compare.best(stories), compare.differences(stories)
    sweeps = {each.sweep for each in stories}
    drawn: list[Chart] = []
    if found is not None:
        place, key = found
        best = stories[place]
        value = value_of(key, best.result[key])
        text += f" The best {title_of(key).lower()} is {value}, of {best.name}."
        if tables["configuration"] and "" not in sweeps:
            drawn = [_parallel(stories, tables["configuration"][:8], place, key)]
    rows = [["", *names]]
    for title, lines in tables.items():
        rows += [[title.capitalize(), *[""] * len(names)], *lines] if lines else []
    if len(stories) > charts.MANY:  # one run in a line
        rows = [list(row) for row in zip(*(row for row in rows if any(row[1:])), strict=True)]
    sweep = f"{sweeps.pop()}: " if len(sweeps) == 1 and "" not in sweeps else ""
    return {
        "title": f"{sweep}{len(stories)} runs",
        "lead": text,
        "sweep": drawn,
        "differences": rows,
        "best": names[found[0]] if found else "",
    }


def _parallel(stories: Sequence[Story], axes: Sequence[list[str]], place: int, key: str) -> Chart:
    titles, *columns = zip(*axes, strict=True)
    known = [number for number, each in enumerate(stories) if key in each.result]
    rows = [[*columns[number], figure(stories[number].result[key])] for number in known]
    values = ", ".join(map(" = ".join, zip(titles, columns[place], strict=True)))
    text = f"Best {title_of(key).lower()}: {stories[place].name}, with {values}."
    return charts.parallel([*titles, title_of(key)], rows, known.index(place), text)


def _curves(stories: Sequence[Story]) -> list[Chart]:
    """Draw every curve that a run has; of one run, training and validation loss together."""
    shown_runs = stories[:OVERLAID]
    keys = list(dict.fromkeys(key for each in shown_runs for key in each.drawn))
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    found, is_one = compare.best(stories), len(stories) == 1
    marks = stories[0].marks if is_one else []
    lines = [mark for mark in marks if mark.kind in charts.LINES]
    result: list[Chart] = []
    columns = max(40, curves.COLUMNS // len(stories))
    for key in keys[:MOST_CURVES]:
        if is_one and key == "val_loss" and result:
            continue
        named = []
        for place, each in enumerate(shown_runs):
            shade = f"c{place}"
            if len(stories) > charts.MANY:
                shade = "c1" if found and found[0] == place else "muted"
            if points := each.drawn.get(key):
                name = title_of(key) if is_one else each.name
                named.append((name, shade, curves.thin(points, columns)))
        if is_one and key == "loss" and (points := stories[0].drawn.get("val_loss")):
            named.append((title_of("val_loss"), "c1", curves.thin(points)))
        title = "Loss" if len(named) > len(stories) else title_of(key)
        may_be_log, is_wide = "loss" in key or key == "grad_norm", key == "loss"
        shown = marks if is_wide else lines
        result.append(charts.curves(title, named, shown, is_wide, may_be_log))
    return result


def _timing(one: Story) -> list[Chart]:
    """Return charts of where the time and the memory of a run went."""
    timing = curves.timing(one.run)
    if timing is None:
        return []
    drawn = [charts.heat_map(timing), *charts.phases(timing)]
    return [*drawn, charts.memory(timing)] if timing.memory else drawn


def _shares(found: Goodput) -> list[dict[str, Any]]:
    """Return the shares of the wall clock: of each its part, its colour and its row of a table."""
    shares = []
    for shade, (name, seconds) in zip(GOODPUT, found.shares.items(), strict=True):
        part = seconds / (found.wall or 1.0)
        if part > 0 or name == "productive":
            row = (name, duration(seconds), f"{part:.1%}", SHARES[name])
            shares.append({"name": name, "part": part, "shade": shade, "row": row})
    return shares


TEMPLATES.globals |= {"tiles": _tiles, "timing_of": _timing, "shares_of": _shares}
TEMPLATES.globals |= {"duration": duration, "clock": clock, "time": time.time}
