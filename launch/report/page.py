"""The report as one HTML file, which needs nothing else."""

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rollcall.launch.report import charts, compare, curves
from rollcall.launch.report.charts import Chart
from rollcall.launch.report.goodput import Shares, shares
from rollcall.launch.report.story import Failure, Story, clock, duration, figure, title_of
from rollcall.launch.runs.states import Progress

STYLE, SCRIPT = ((Path(__file__).parent / name).read_text() for name in ("page.css", "page.js"))
FIRST = ("loss", "val_loss", "val_accuracy", "grad_norm", "lr", "samples_per_second")
"""Curves in this order; others follow."""
MOST_CURVES = 12
DETAILED = 4
"""Of this many runs, the report shows where the time went, failures and configuration."""
MANY = 8
"""With more runs than there are colours, the best one stands out."""
GOODPUT = ("c2", "muted", "c5", "c4", "c0", "c3", "warn", "bad", "line")
"""Colours of the shares of the wall clock, in their order."""
STATES = {"done": "good", "running": "live", "pending": "warn", "failed": "bad", "lost": "bad"}


def page(stories: Sequence[Story]) -> str:
    """Return the HTML of the report of these runs; at least one."""
    stories = compare.ranked(stories)
    first = stories[0]
    is_one = len(stories) == 1
    body = [_header(first) if is_one else _header_of_all(stories)]
    body += _failures(first.failures) if is_one else []
    body += _overlay(stories) if not is_one else []
    body.append(_section("Progress", "", _figures(_curves(stories))))
    if is_one:
        body += [*_time(first), *_about(first)]
    for each in () if is_one else stories[:DETAILED]:
        inside = "".join([*_failures(each.failures), *_time(each), *_about(each)])
        body.append(f"<details class=run><summary>{escape(each.name)}</summary>{inside}</details>")
    if len(stories) > DETAILED:
        left = len(stories) - DETAILED
        text = f"For where the time of the other {left} runs went, make a report of each."
        body.append(_note(text))
    body.append(f"<footer>Made by rollcall report on {clock(time.time())}.</footer>")
    return document(first.name if is_one else f"{len(stories)} runs", "".join(body))


def listing(rows: Iterable[tuple[str, str, str, Progress]]) -> str:
    """Return the page of all runs; a row has the address, the name, the state and the progress."""
    lines = "".join(
        f'<tr><th scope="row"><a href="{escape(address)}">{escape(name)}</a></th>'
        f'<td class="{STATES.get(state, "")}">{escape(state)}</td>'
        f"<td>{'' if done.step is None else f'{done.step:,}'}</td>"
        f"<td>{escape(', '.join(f'{key} {figure(n)}' for key, n in done.validation.items()))}"
        "</td></tr>"
        for address, name, state, done in rows
    )
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("run", "state", "step", "validation")
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    if not lines:
        table = _note("There are no runs here yet.")
    return document("Runs", f"<header><h1>Runs</h1></header><div class=scroll>{table}</div>")


def document(title: str, body: str) -> str:
    """Return a whole page, which loads nothing and runs no script but SCRIPT."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    policy += f"script-src 'sha256-{digest}'"
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} · rollcall</title><style>{STYLE}</style></head><body>"
    )
    text = f"{head}<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    # Names of files are bytes, not always text.
    return text.encode(errors="replace").decode()


def _header(one: Story) -> str:
    state = one.condition.state
    return (
        f'<header><p class="eyebrow">Run report</p><h1>{escape(one.name)} '
        f'<span class="state {STATES.get(state, "")}">{escape(state)}</span></h1>'
        f"<p class=lead>{escape(in_words(one))}</p>{_tiles(_numbers(one))}</header>"
    )


def in_words(one: Story) -> str:
    """Say how a run stands, in one or two sentences."""
    step, total = one.progress.step, one.progress.total
    done = "no step was logged" if step is None else f"step {step:,}"
    done += f" of {total:,}" if step is not None and total else ""
    known = [
        f"{title_of(key).lower()} {_value(key, one.result[key])}"
        for key in ("val_accuracy", "val_loss", "loss")
        if key in one.result
    ][:2]
    text = f"{done[:1].upper()}{done[1:]}" + (f"; {', '.join(known)}" if known else "") + "."
    if one.failures and one.condition.state in ("failed", "lost"):
        text += f" {one.failures[0].cause.what}."
    elif one.condition.is_live and one.progress.left:
        text += f" About {duration(one.progress.left)} left."
    elif one.condition.note and one.condition.state != "failed":
        text += f" {one.condition.note[:1].upper()}{one.condition.note[1:]}."
    restarts = sum(mark.kind == "restart" for mark in one.marks)
    if restarts:
        text += f" It resumed {'once' if restarts == 1 else f'{restarts} times'}."
    return text


def _value(key: str, value: float) -> str:
    return f"{value:.2%}" if key == "val_accuracy" and 0 <= value <= 1 else figure(value)


def _numbers(one: Story) -> list[tuple[str, str]]:
    step, total = one.progress.step, one.progress.total
    found = [("Steps", "" if step is None else f"{step:,}" + (f" / {total:,}" if total else ""))]
    keys = ("val_accuracy", "val_loss", "loss", "samples_per_second")
    found += [(title_of(key), _value(key, one.result[key])) for key in keys if key in one.result]
    if one.started is not None and one.newest > one.started:
        found.append(("Wall clock", duration(one.newest - one.started)))
    measured = shares(one.run)
    if measured is not None and measured.wall > 0:
        found.append(("Goodput", f"{measured.shares.get('productive', 0) / measured.wall:.1%}"))
    found += [("Ranks", one.facts.get("ranks", ""))]
    found += [("Attempts", str(one.condition.attempts or ""))]
    return [(name, value) for name, value in found if value]


def _tiles(numbers: Iterable[tuple[str, str]]) -> str:
    cells = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in numbers)
    return f"<dl class=tiles>{''.join(cells)}</dl>"


def _header_of_all(stories: Sequence[Story]) -> str:
    found = compare.best(stories)
    states = [each.condition.state for each in stories]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) + "."
    if found is not None:
        best, key = stories[found[0]], found[1]
        text += (
            f" The best {title_of(key).lower()} is {_value(key, best.result[key])}, of {best.name}."
        )
    return (
        f'<header><p class="eyebrow">Report of several runs</p><h1>{len(stories)} runs</h1>'
        f"<p class=lead>{escape(text)}</p></header>"
    )


def _overlay(stories: Sequence[Story]) -> list[str]:
    """Return what compares the runs: tables, and of a sweep parallel coordinates."""
    names = [each.name for each in stories]
    parts = []
    found, tables = compare.best(stories), compare.differences(stories)
    axes = tables["configuration"][:8]
    if found is not None and axes and {each.sweep for each in stories} != {""}:
        key = found[1]
        known = [place for place, each in enumerate(stories) if key in each.result]
        columns = [[row[1 + place] for row in axes] for place in known]
        rows = [[*c, figure(stories[p].result[key])] for c, p in zip(columns, known, strict=True)]
        chosen = ", ".join(f"{row[0]} = {row[1 + found[0]]}" for row in axes)
        text = f"Best {title_of(key).lower()}: {names[found[0]]}, with {chosen}."
        titles = [*(row[0] for row in axes), title_of(key)]
        picture = charts.parallel(titles, rows, known.index(found[0]), text)
        parts.append(_section("Sweep", "", _figures([picture])))
    rows = [["", *names]]
    for title, lines in tables.items():
        if lines:
            rows += [[title.capitalize(), *[""] * len(names)], *lines]
    if len(stories) > MANY:  # one run in a line
        rows = [list(row) for row in zip(*(row for row in rows if any(row[1:])), strict=True)]
    parts.append(_section("What differs", "", _table(rows, names[found[0]] if found else "")))
    return parts


def _curves(stories: Sequence[Story]) -> list[Chart]:
    """Draw every curve that a run has; of one run, training and validation loss together."""
    known = dict.fromkeys(key for each in stories for key, points in each.curves.items() if points)
    keys = sorted(known, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    found, marks = compare.best(stories), stories[0].marks if len(stories) == 1 else []
    lines = [mark for mark in marks if mark.kind not in ("checkpoint", "evaluation")]
    result = []
    for key in keys[:MOST_CURVES]:
        shown = [(place, each) for place, each in enumerate(stories) if each.curves.get(key)]
        named = []
        for place, each in shown:
            shade = f"c{place}"
            if len(stories) > MANY:
                shade = "c1" if found and found[0] == place else "muted"
            name = title_of(key) if len(stories) == 1 else each.name
            named.append((name, shade, curves.thin(each.curves[key])))
        if len(stories) == 1 and key == "loss" and (points := stories[0].curves.get("val_loss")):
            named.append((title_of("val_loss"), "c1", curves.thin(points)))
            result.append(charts.curves("Loss", named, marks, is_wide=True, may_be_log=True))
        elif not (len(stories) == 1 and key == "val_loss" and result):
            is_wide, may_be_log = key == "loss", "loss" in key or key == "grad_norm"
            shown_marks = marks if is_wide else lines
            result.append(charts.curves(title_of(key), named, shown_marks, is_wide, may_be_log))
    return result


def _time(one: Story) -> list[str]:
    """Return where the time and the memory of a run went."""
    parts = []
    measured = shares(one.run)
    if measured is not None and measured.wall > 0:
        parts.append(_section("Goodput", "", _goodput(measured)))
    timing = curves.timing(one.run)
    if timing is not None:
        memory = charts.memory(timing)
        drawn = [charts.heat_map(timing), *charts.phases(timing), *([memory] if memory else [])]
        parts.append(_section("Where the time of a step goes", "", _figures(drawn)))
    return parts


def _goodput(measured: Shares) -> str:
    """Return the shares of the wall clock as a bar and a table."""
    bar, rows = "", [["Share", "Time", "Of the wall clock"]]
    for shade, (name, seconds) in zip(GOODPUT, measured.shares.items(), strict=False):
        part = min(max(seconds / measured.wall, 0), 1)
        bar += f'<i style="width:{part:.3%};background:var(--{shade})"></i>'
        rows.append([name, duration(seconds) or "0 s", f"{part:.1%}"])
    rows.append(["wall clock", duration(measured.wall), "100%"])
    text = ", ".join(f"{row[0]} {row[2]}" for row in rows[1:-1])
    keys = [(shade, name) for shade, name in zip(GOODPUT, measured.shares, strict=False)]
    label = f'role="img" aria-label="{escape(text)}"'
    return f"<div class=bar {label}>{bar}</div>{_legend(keys)}{_table(rows)}"


def _failures(failures: Sequence[Failure]) -> list[str]:
    inside = ""
    for each in failures:
        more = "".join(
            f"<p>{escape(text)}</p>" for text in (each.cause.hint, each.cause.consequences) if text
        )
        log = f"<pre>{escape(chr(10).join(each.lines))}</pre>" if each.lines else ""
        path = f"<p class=quiet>{escape(str(each.cause.log))}</p>" if each.lines else ""
        what = f"<h3>{escape(each.title)}: {escape(each.cause.what)}</h3>"
        inside += f"<article class=failure>{what}{more}{path}{log}</article>"
    title = "What failed" if len(failures) == 1 else f"What failed, {len(failures)} attempts"
    return [_section(title, "", inside)] if failures else []


def _about(one: Story) -> list[str]:
    """Return the sections about attempts, environment and configuration."""
    parts = []
    if one.attempts:
        parts.append(_section("Attempts", "", _table(one.attempts)))
    if one.facts:
        parts.append(_section("Code and environment", "", _table([["", ""], *one.facts.items()])))
    if one.settings:
        rows = [[key, value, origin] for key, (value, origin) in one.settings.items()]
        chosen = [row for row in rows if row[2] != "default"]
        titles = ["key", "value", "from"]
        rest = _table([titles, *(row for row in rows if row[2] == "default")])
        inside = _table([titles, *chosen]) if chosen else ""
        inside += f"<details><summary>{len(rows) - len(chosen)} defaults</summary>{rest}</details>"
        parts.append(_section("Configuration", "", inside))
    if one.notes:
        parts.append(_section("Notes", "", "".join(map(_note, one.notes))))
    return parts


def _section(title: str, lead: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{lead}{inside}</section>" if inside else ""


def _note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>"


def _figures(drawn: Sequence[Chart]) -> str:
    return f"<div class=grid>{''.join(map(_figure, drawn))}</div>" if drawn else ""


def _figure(chart: Chart) -> str:
    # `<` could end the element that holds the numbers.
    data = json.dumps(chart.data, separators=(",", ":")).replace("<", "\\u003c")
    kind = " class=wide" if chart.is_wide else ""
    scale = '<div class=scale aria-hidden="true"></div>' if "grid" in chart.data else ""
    return (
        f"<figure{kind}><h3>{escape(chart.title)}</h3>{_legend(chart.legend)}{scale}"
        f"<div class=plot>{''.join(chart.pictures)}</div>"
        f"<figcaption>{escape(chart.text)}</figcaption>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    items = (
        f'<li><i{" class=mark" * (name in charts.LINES)} style="background:var(--{shade})"></i>'
        f"{escape(name)}</li>"
        for shade, name in keys
    )
    return f"<ul class=legend>{''.join(items)}</ul>" if keys else ""


def _table(rows: Sequence[Sequence[str]], best: str = "") -> str:
    """Return a table whose first row has the titles, in a box that scrolls sideways.

    Args:
        best: the column or the row of this title stands out.
    """
    head, *others = rows
    kinds = [" class=best" if best and title == best else "" for title in head]
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = ""
    for first, *cells in others:
        if cells and not any(cells):
            lines += f'<tr class=group><th colspan="{len(head)}">{escape(first)}</th></tr>'
            continue
        cells_of = zip(kinds[1:], cells, strict=True)
        values = "".join(
            f"<td{' class=long' if len(cell) > 60 else kind}>{escape(cell)}</td>"
            for kind, cell in cells_of
        )
        kind = " class=best" if best and first == best else ""
        lines += f'<tr{kind}><th scope="row">{escape(first)}</th>{values}</tr>'
    shown = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class=scroll tabindex="0"><table>{shown}<tbody>{lines}</tbody></table></div>'
