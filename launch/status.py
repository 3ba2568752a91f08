"""`python -m launch status [RUN …]`: one table of runs, live with --watch.

States come from the runs' files; Slurm is asked about jobs that wait or run, and about those that
ended without a word. So it needs no slurmdbd, and works for jobs that Slurm has forgotten.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from launch import runs, states
from launch.runs import NoRunError
from launch.states import Condition, Progress
from train.run import RunDir

EVERY = 5.0
"""Seconds between two looks while watching."""
WIDE = 250
"""Columns of a table that goes to a file or a pipe."""
NARROW = 110
"""Columns of a terminal below which the table has fewer columns, and notes have their own lines."""
LEFT_OUT = ("samples/s", "attempts", "nodes", "")
COLOURS = {"running": "green", "pending": "yellow", "failed": "red", "lost": "red"}


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = runs.parser("status", __doc__, nargs="*")
    parser.add_argument("--watch", action="store_true", help="keep the table live until Ctrl-C")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    try:
        if options.watch:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    found = _chosen(options.run, options.root)
                    live.update(_table(found, options.root, console.width), refresh=True)
                    time.sleep(EVERY)
        found = _chosen(options.run, options.root)
    except NoRunError as error:
        return runs.refuse("status", error)
    except KeyboardInterrupt:
        return 0
    if found:
        console.print(_table(found, options.root, console.width))
    else:
        print(f"there are no runs in {options.root}")
    return 0


def _chosen(words: Sequence[str], root: str) -> list[RunDir]:
    if not words:
        return runs.find_all(root)
    return [run for word in words for run in runs.with_cells(runs.find(word, root).path)]


def _table(found: Sequence[RunDir], root: str, width: int) -> Group:
    conditions, complaint = states.look(found)
    base = Path(root).absolute()
    rows = []
    for run, condition in zip(found, conditions, strict=True):
        if runs.is_sweep(run) and not condition.is_live:
            continue  # its cells tell all
        name = str(run.path.relative_to(base)) if base in run.path.parents else run.name
        rows.append({"run": escape(name), **_cells(condition, states.progress(run))})
    names = ["run", *_cells(Condition(""), Progress())]
    notes = []
    if width < NARROW:
        names = [name for name in names if name not in LEFT_OUT]
        notes = [f"{row['run']}: {row['']}" for row in rows if row[""]]
    table = Table(box=None, pad_edge=False)
    for name in names:
        justify: JustifyMethod = "left" if name in ("run", "state", "") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return Group(table, *notes, *([complaint] if complaint else []))


def _cells(condition: Condition, progress: Progress) -> dict[str, str]:
    """What a row tells besides the name of the run, by column."""
    colour = COLOURS.get(condition.state)
    is_moving = condition.state == "running"
    return {
        "state": f"[{colour}]{condition.state}[/]" if colour else condition.state,
        "step": _steps(progress),
        "loss": "" if progress.loss is None else f"{progress.loss:.4f}",
        "samples/s": "" if progress.rate is None else f"{progress.rate:,.0f}",
        "left": _clock(progress.left) if is_moving and progress.left is not None else "",
        "attempts": str(condition.attempts or ""),
        "nodes": str(condition.nodes or ""),
        "job": condition.job.id if condition.job else "",
        "": escape(condition.note),
    }


def _steps(progress: Progress) -> str:
    if progress.step is None:
        return ""
    if not progress.total:
        return str(progress.step)
    return f"{progress.step}/{progress.total} {progress.step / progress.total:4.0%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
