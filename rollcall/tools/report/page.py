"""The report as one HTML file, which needs nothing else: the content of report.html."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcall.launch.runs.goodput import SHARES, Goodput
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import clock, duration, figure
from rollcall.tools.report import charts, compare, curves
from rollcall.tools.report.charts import Chart
from rollcall.tools.report.story import Story, axis_of, title_of, value_of

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise RefusedError(charts.MISSING.format("jinja2")) from error

FIRST = ("loss", "val_loss", "val_accuracy", "grad_norm", "lr", "samples_per_second")
"""Curves in this order; others follow."""
TILES = ("val_accuracy", "val_loss", "loss", "samples_per_second")
"""Curves whose last value is shown at the top."""
OF_LAYERS = ("expert_imbalance", "router_entropy", "dropped_tokens")
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


def listing(rows: Sequence[tuple[str, str, str, dict[str, str]]]) -> str:
    """Return the page of all runs; a row has address, name, curve, and cells by column."""
    return _filled("list.html", title="Runs", rows=rows)


def _filled(template: str, **values: Any) -> str:
    text = TEMPLATES.get_template(template).render(values)
    return text.encode(errors="replace").decode()  # names of files are bytes, not always text


def _tiles(run: Story) -> dict[str, str]:
    """Return the figures at the top of a report of one run."""
    step, total = run.progress.step, run.progress.total
    tiles = {f"Steps, of {total:,}" if total else "Steps": "" if step is None else f"{step:,}"}
    known = [key for key in TILES if key in run.newest]
    known = [key for key in known if key != "loss" or "val_loss" not in known]
    tiles |= {title_of(key): value_of(key, run.newest[key]) for key in known}
    if run.goodput is not None:
        tiles["Goodput"] = f"{run.goodput.productive:.1%}"
        tiles["Wall clock"] = duration(run.goodput.wall)
    tiles["Ranks"] = run.facts.get("ranks", "")
    tiles["Attempts, from 0"] = str(run.condition.attempts or "")
    return tiles


def in_words(run: Story) -> str:
    """Say how a run stands, in a few sentences."""
    step, total = run.progress.step, run.progress.total
    of_total = f" of {total:,}" if total else ""
    text = "No step was logged" if step is None else f"Step {step:,}{of_total}"
    known = [key for key in TILES[:3] if key in run.newest][:2]
    figures = [f"{title_of(key).lower()} {value_of(key, run.newest[key])}" for key in known]
    text += f"; {', '.join(figures)}." if figures else "."
    if run.failures and run.condition.state in ("failed", "lost"):
        cause = run.failures[0].cause.what
        text += f" {cause[:1].upper()}{cause[1:]}."
    elif run.condition.is_live and run.progress.left:
        text += f" About {duration(run.progress.left.total_seconds())} left."
    elif run.condition.note and run.condition.state != "failed":
        text += f" {run.condition.note[:1].upper()}{run.condition.note[1:]}."
    restarts = sum(mark.kind == "restart" for mark in run.marks)
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"{text} It resumed {times}." if restarts else text


def _of_all(stories: Sequence[Story]) -> dict[str, Any]:
    """Compare the runs: the header, a table, and parallel coordinates of a sweep."""
    states = [run.condition.state for run in stories]
    names = [run.name for run in stories]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) + "."
    winner, tables = compare.best(stories), compare.differences(stories)
    sweeps = {run.sweep for run in stories}
    drawn: list[Chart] = []
    if winner is not None:
        number, key = winner
        value = value_of(key, stories[number].result[key])
        text += f" The best {title_of(key).lower()} is {value}, of {names[number]}."
        if tables["configuration"] and "" not in sweeps:
            axes = [row for row in tables["configuration"] if row[0] != "seed"]
            drawn = [_parallel(stories, (axes or tables["configuration"])[:8], number, key)]
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
        "seeds": compare.over_seeds(stories),
        "best": compare.best_cells(stories),
    }


def _parallel(
    stories: Sequence[Story], axes: Sequence[list[str]], number_of_best: int, key: str
) -> Chart:
    titles, *columns = zip(*axes, strict=True)
    known = [number for number, run in enumerate(stories) if key in run.result]
    rows = [[*columns[number], figure(stories[number].result[key])] for number in known]
    values = ", ".join(map(" = ".join, zip(titles, columns[number_of_best], strict=True)))
    text = f"Best {title_of(key).lower()}: {stories[number_of_best].name}, with {values}."
    return charts.parallel([*titles, title_of(key)], rows, known.index(number_of_best), text)


def _curves(stories: Sequence[Story]) -> list[Chart]:
    """Draw every curve that a run has; of one run, training and validation loss together."""
    shown_runs = stories[:OVERLAID]
    groups = {run.name: [run] for run in shown_runs}
    if compare.over_seeds(shown_runs):
        by_keys = compare.grouped(shown_runs, "seed")
        groups = min(groups, {", ".join(p): runs for p, runs in by_keys.items()}, key=len)
    keys = list(dict.fromkeys(key for run in shown_runs for key in run.drawn))
    parts = ((key, [row for row in keys if row.startswith(f"{key}/")]) for key in keys)
    maps = {key: rows for key, rows in parts if len(rows) > 1}
    keys = [key for key in keys if not any(key in rows for rows in maps.values())]
    keys.sort(key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    winner, is_one = compare.best(stories), len(stories) == 1
    marks = stories[0].marks if is_one else []
    lines = [mark for mark in marks if mark.kind in charts.LINES]
    result: list[Chart] = []
    columns = max(40, curves.COLUMNS // len(stories))
    steps = [of[-1][0] for run in shown_runs for of in run.drawn.values()]
    last = float(max([*steps, *(mark.step for mark in marks)], default=0))
    for key in keys[:MOST_CURVES]:
        few = key != "loss" and all(len(run.drawn.get(key, ())) < 2 for run in shown_runs)
        if few or (is_one and key == "val_loss" and result):
            continue  # the value of a single point is in the table, or at the top
        named = []
        for number, (name, runs) in enumerate(groups.items()):
            shade = f"c{number}"
            if len(groups) > charts.MANY:
                shade = "c1" if winner and stories[winner[0]] in runs else "muted"
            known = [curves.thin(run.drawn[key], columns) for run in runs if run.drawn.get(key)]
            if curve := curves.mean(known) if len(known) > 1 else next(iter(known), None):
                named.append((title_of(key) if is_one else name or "mean", shade, curve))
        if not named:
            continue
        if is_one and key == "loss" and (points := stories[0].drawn.get("val_loss")):
            named.append((title_of("val_loss"), "c1", curves.thin(points)))
        title = "Loss" if len(named) > len(stories) else axis_of(key)
        may_be_log, is_wide = "loss" in key or key == "grad_norm", key == "loss"
        may_be_log |= key == "lr" and not is_one  # rates that sweeps compare
        shown = marks if is_wide else lines
        band = charts.SPREAD if len(groups) < len(shown_runs) else charts.EXTREMES
        result.append(charts.curves(title, named, shown, last, is_wide, may_be_log, band))
    for key, rows in maps.items() if is_one else ():
        named_rows = ((row.removeprefix(f"{key}/"), stories[0].drawn[row]) for row in rows)
        drawn = {name: points for name, points in named_rows if len(points) > 1}
        kind = "layer" if key in OF_LAYERS else "part"
        result += [charts.by_part(title_of(key), drawn, kind)] if drawn else []
    return result


def _timing(run: Story) -> list[Chart]:
    """Return charts of where the time and the memory of a run went."""
    timing = curves.timing(run.run)
    if timing is None:
        return []
    drawn = [charts.heat_map(timing), *charts.phases(timing)]
    return [*drawn, charts.memory(timing)] if timing.memory else drawn


def _shares(goodput: Goodput) -> list[dict[str, Any]]:
    """Return the shares of the wall clock: of each its part, its colour and its row of a table."""
    shares = []
    for shade, (name, seconds) in zip(GOODPUT, goodput.shares.items(), strict=True):
        part = seconds / (goodput.wall or 1.0)
        if part > 0 or name == "productive":
            row = (name, duration(seconds), f"{part:.1%}", SHARES[name])
            shares.append({"name": name, "part": part, "shade": shade, "row": row})
    return shares


TEMPLATES.globals |= {"tiles": _tiles, "timing_of": _timing, "shares_of": _shares}
TEMPLATES.globals |= {"duration": duration, "clock": clock, "time": time.time}
