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
from rollcall.launch.report.story import Failure, Story, clock, figure, title_of
from rollcall.launch.runs.goodput import SHARES, Goodput
from rollcall.launch.runs.states import Progress
from rollcall.text import duration

STYLE, SCRIPT = ((Path(__file__).parent / name).read_text() for name in ("page.css", "page.js"))
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


def page(stories: Sequence[Story]) -> str:
    """Return the HTML of the report of these runs; at least one."""
    first, *others = stories = compare.ranked(stories)
    drawn = _section("Progress", _figures(_curves(stories)))
    if not others:
        title = first.name
        body = _header(first) + _failures(first.failures) + drawn + _time(first) + _about(first)
    else:
        title = f"{len(stories)} runs"
        body = _header_of_all(stories) + _overlay(stories) + drawn
    for each in stories[:DETAILED] if others else ():
        inside = _failures(each.failures) + _time(each) + _about(each)
        body += f"<details class=run><summary>{escape(each.name)}</summary>{inside}</details>"
    if len(stories) > DETAILED:
        text = f"The curves are of the first {OVERLAID} runs. " * (len(stories) > OVERLAID)
        body += _note(f"{text}The details of the other runs are in a report of each.")
    body += f"<footer>Made by rollcall report on {clock(time.time())}.</footer>"
    return document(title, body)


def listing(rows: Iterable[tuple[str, str, str, Progress]]) -> str:
    """Return the page of all runs; a row has the address, the name, the state and the progress."""
    lines = ""
    for address, name, state, done in rows:
        texts = (f"{key} {figure(value)}" for key, value in done.validation.items())
        figures = escape(", ".join(texts))
        step = "" if done.step is None else f"{done.step:,}"
        lines += (
            f'<tr><th scope="row"><a href="{escape(address)}">{escape(name)}</a></th><td class="'
            f'{STATES.get(state, "")}">{escape(state)}</td><td>{step}</td><td>{figures}</td></tr>'
        )
    table = f"<div class=scroll><table>{lines}</table></div>" if lines else _note("No runs yet.")
    return document("Runs", f"<header><h1>Runs</h1></header>{table}")


def document(title: str, body: str) -> str:
    """Return a whole page, which loads nothing and runs no script but SCRIPT."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    policy += f"script-src 'sha256-{digest}'"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} · rollcall</title><style>{STYLE}</style></head><body>"
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )
    return text.encode(errors="replace").decode()  # names of files are bytes, not always text


def _header(one: Story) -> str:
    state, (step, total) = one.condition.state, (one.progress.step, one.progress.total)
    tiles = {f"Steps, of {total:,}" if total else "Steps": "" if step is None else f"{step:,}"}
    known = [key for key in TILES if key in one.result]
    known = [key for key in known if key != "loss" or "val_loss" not in known]
    tiles |= {title_of(key): _value(key, one.result[key]) for key in known}
    if one.goodput is not None:
        tiles["Goodput"] = f"{one.goodput.productive:.1%}"
        tiles["Wall clock"] = duration(one.goodput.wall)
    tiles["Ranks"] = one.facts.get("ranks", "")
    tiles["Attempts"] = str(one.condition.attempts or "")
    cells = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in tiles.items() if b)
    pill = f'<span class="state {STATES.get(state, "")}">{escape(state)}</span>'
    words = f"<p class=lead>{escape(in_words(one))}</p><dl class=tiles>{''.join(cells)}</dl>"
    return (
        f"<header><p class=eyebrow>Run report</p><h1>{escape(one.name)} {pill}</h1>{words}</header>"
    )


def in_words(one: Story) -> str:
    """Say how a run stands, in a few sentences."""
    step, total = one.progress.step, one.progress.total
    text = "No step was logged" if step is None else f"Step {step:,}"
    text += f" of {total:,}" if step is not None and total else ""
    known = [key for key in TILES[:3] if key in one.result][:2]
    figures = [f"{title_of(key).lower()} {_value(key, one.result[key])}" for key in known]
    text += f"; {', '.join(figures)}." if figures else "."
    if one.failures and one.condition.state in ("failed", "lost"):
        cause = one.failures[0].cause.what
        text += f" {cause[:1].upper()}{cause[1:]}."
    elif one.condition.is_live and one.progress.left:
        text += f" About {duration(one.progress.left)} left."
    elif one.condition.note and one.condition.state not in ("failed", "done"):
        text += f" {one.condition.note[:1].upper()}{one.condition.note[1:]}."
    restarts = sum(mark.kind == "restart" for mark in one.marks)
    return text + (
        f" It resumed {'once' if restarts == 1 else f'{restarts} times'}." * bool(restarts)
    )


def _value(key: str, value: float) -> str:
    return f"{value:.2%}" if key == "val_accuracy" and 0 <= value <= 1 else figure(value)


def _header_of_all(stories: Sequence[Story]) -> str:
    states = [each.condition.state for each in stories]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) + "."
    if (found := compare.best(stories)) is not None:
        best, key = stories[found[0]], found[1]
        value = _value(key, best.result[key])
        text += f" The best {title_of(key).lower()} is {value}, of {best.name}."
    sweeps = {each.sweep for each in stories}
    name = f"{sweeps.pop()}: " if len(sweeps) == 1 and "" not in sweeps else ""
    title = "<p class=eyebrow>Report of several runs</p>"
    title += f"<h1>{escape(name)}{len(stories)} runs</h1>"
    return f"<header>{title}<p class=lead>{escape(text)}</p></header>"


def _overlay(stories: Sequence[Story]) -> str:
    """Return what compares the runs: a table, and of a sweep parallel coordinates."""
    names, parts = [each.name for each in stories], ""
    found, tables = compare.best(stories), compare.differences(stories)
    axes = tables["configuration"][:8]
    if found is not None and axes and all(each.sweep for each in stories):
        place, key = found
        known = [number for number, each in enumerate(stories) if key in each.result]
        rows = [
            [*(row[1 + number] for row in axes), figure(stories[number].result[key])]
            for number in known
        ]
        values = ", ".join(f"{row[0]} = {row[1 + place]}" for row in axes)
        text = f"Best {title_of(key).lower()}: {names[place]}, with {values}."
        titles = [*(row[0] for row in axes), title_of(key)]
        picture = charts.parallel(titles, rows, known.index(place), text)
        parts = _section("Sweep", _figures([picture]))
    rows = [["", *names]]
    for title, lines in tables.items():
        rows += [[title.capitalize(), *[""] * len(names)], *lines] if lines else []
    if len(stories) > charts.MANY:  # one run in a line
        rows = [list(row) for row in zip(*(row for row in rows if any(row[1:])), strict=True)]
    return parts + _section("Differences", _table(rows, names[found[0]] if found else ""))


def _curves(stories: Sequence[Story]) -> list[Chart]:
    """Draw every curve that a run has; of one run, training and validation loss together."""
    keys = list(
        dict.fromkeys(key for each in stories[:OVERLAID] for key, of in each.curves.items() if of)
    )
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
        for place, each in enumerate(stories[:OVERLAID]):
            shade = f"c{place}"
            if len(stories) > charts.MANY:
                shade = "c1" if found and found[0] == place else "muted"
            if points := each.curves.get(key):
                name = title_of(key) if is_one else each.name
                named.append((name, shade, curves.thin(points, columns)))
        if is_one and key == "loss" and (points := stories[0].curves.get("val_loss")):
            named.append((title_of("val_loss"), "c1", curves.thin(points)))
        title = "Loss" if len(named) > len(stories) else title_of(key)
        may_be_log, is_wide = "loss" in key or key == "grad_norm", key == "loss"
        shown = marks if is_wide else lines
        result.append(charts.curves(title, named, shown, is_wide, may_be_log))
    return result


def _time(one: Story) -> str:
    """Return where the time and the memory of a run went."""
    parts = _section("Goodput", _goodput(one.goodput)) if one.goodput is not None else ""
    timing = curves.timing(one.run)
    if timing is None:
        return parts
    drawn = [charts.heat_map(timing), *charts.phases(timing)]
    drawn += [charts.memory(timing)] if timing.memory else []
    return parts + _section("Where the time of a step goes", _figures(drawn))


def _goodput(found: Goodput) -> str:
    """Return the shares of the wall clock as a bar and a table."""
    bar, rows, text = "", [["share", "time", "of the wall clock", "what it is"]], []
    shown = [
        (shade, *share)
        for shade, share in zip(GOODPUT, found.shares.items(), strict=False)
        if share[1] > 0 or share[0] == "productive"
    ]
    for shade, name, seconds in shown:
        part = seconds / found.wall if found.wall else 0.0
        bar += f'<i style="width:{min(max(part, 0), 1):.3%};background:var(--{shade})"></i>'
        rows.append([name, duration(seconds), f"{part:.1%}", SHARES.get(name, "")])
        text.append(f"{name} {part:.1%}")
    rows.append(["wall clock", duration(found.wall), "100.0%", ""])
    label = f'role="img" aria-label="{escape(", ".join(text))}"'
    keys = _legend([(shade, name) for shade, name, _ in shown])
    return f"<div class=bar {label}>{bar}</div>{keys}{_table(rows)}"


def _failures(failures: Sequence[Failure]) -> str:
    inside = ""
    for each in failures:
        path = str(each.cause.log) if each.lines else ""
        texts = [text for text in (each.cause.hint, each.cause.consequences, path) if text]
        inside += f"<article class=failure><h3>{escape(each.title)}: {escape(each.cause.what)}</h3>"
        inside += "".join(f"<p>{escape(text)}</p>" for text in texts)
        log = "\n".join(each.lines)
        inside += (f"<pre>{escape(log)}</pre>" if log else "") + "</article>"
    count = f", {len(failures)} attempts" if len(failures) > 1 else ""
    return _section(f"Failures{count}", inside)


def _about(one: Story) -> str:
    """Return the sections about attempts, environment and configuration."""
    parts = _section("Attempts", _table(one.attempts) if one.attempts else "")
    facts = [["", ""], *([name, text] for name, text in one.facts.items() if text)]
    parts += _section("Code and environment", _table(facts) if one.facts else "")
    if one.settings:
        rows = [[key, value, origin] for key, (value, origin) in one.settings.items()]
        titles, chosen = ["key", "value", "from"], [row for row in rows if row[2] != "default"]
        rest = _table([titles, *(row for row in rows if row[2] == "default")])
        inside = _table([titles, *chosen]) if chosen else ""
        inside += f"<details><summary>{len(rows) - len(chosen)} defaults</summary>{rest}</details>"
        parts += _section("Configuration", inside)
    return parts + _section("Notes", "".join(map(_note, one.notes)))


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def _note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>"


def _figures(drawn: Sequence[Chart]) -> str:
    return f"<div class=grid>{''.join(map(_figure, drawn))}</div>" if drawn else ""


def _figure(chart: Chart) -> str:
    # `<` could end the element that holds the numbers.
    data = json.dumps(chart.data, separators=(",", ":")).replace("<", "\\u003c")
    kind = " class=wide" if len(chart.pictures) > 1 else ""
    scale = '<div class=scale aria-hidden="true"></div>' if "grid" in chart.data else ""
    return (
        f"<figure{kind}><h3>{escape(chart.title)}</h3>{_legend(chart.legend)}{scale}"
        f"<div class=plot>{''.join(chart.pictures)}</div><figcaption>{escape(chart.text)}"
        f'</figcaption><script type="application/json">{data}</script></figure>'
    )


def _legend(keys: Sequence[tuple[str, str]]) -> str:
    items = ""
    for shade, name in keys:
        mark = " class=mark" if charts.LINES.get(name, "")[:1] == (shade,) else ""
        items += f'<li><i{mark} style="background:var(--{shade})"></i>{escape(name)}</li>'
    return f"<ul class=legend>{items}</ul>" if keys else ""


def _table(rows: Sequence[Sequence[str]], best: str = "") -> str:
    """Return a table whose first row has the titles, in a box that scrolls sideways.

    Args:
        best: the column or the row of this title stands out.
    """
    head, *others = rows
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = ""
    for first, *cells in others:
        if cells and not any(cells):
            lines += f'<tr class=group><th colspan="{len(head)}">{escape(first)}</th></tr>'
            continue
        lines += "<tr class=best>" if best and first == best else "<tr>"
        lines += f'<th scope="row">{escape(first)}</th>'
        for title, cell in zip(head[1:], cells, strict=True):
            kind = " class=long" if len(cell) > 60 else " class=best" if title == best != "" else ""
            lines += f"<td{kind}>{escape(cell)}</td>"
        lines += "</tr>"
    shown = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class=scroll tabindex="0"><table>{shown}<tbody>{lines}</tbody></table></div>'
