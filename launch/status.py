"""`python -m launch status [RUN …]`: one table of runs, live with --watch.

States come from the runs' files; Slurm is asked about jobs that wait or run, and about those that
ended without a word. So it needs no slurmdbd, and works for jobs that Slurm has forgotten.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
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
                    live.update(_table(found, options.root), refresh=True)
                    time.sleep(EVERY)
        found = _chosen(options.run, options.root)
    except NoRunError as error:
        return runs.refuse("status", error)
    except KeyboardInterrupt:
        return 0
    if found:
        console.print(_table(found, options.root))
    else:
        print(f"there are no runs in {options.root}")
    return 0


def _chosen(words: Sequence[str], root: str) -> list[RunDir]:
    return [runs.find(word, root) for word in words] if words else runs.find_all(root)


def _table(found: Sequence[RunDir], root: str) -> Group:
    conditions, complaint = states.look(found)
    base = Path(root).absolute()
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "loss", "samples/s", "left", "attempts", "nodes", "job"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for run, condition in zip(found, conditions, strict=True):
        if runs.is_sweep(run) and not condition.is_live:
            continue  # its cells tell all
        name = str(run.path.relative_to(base)) if base in run.path.parents else run.name
        table.add_row(escape(name), *_cells(condition, states.progress(run)))
    return Group(table, complaint) if complaint else Group(table)


def _cells(condition: Condition, progress: Progress) -> list[str]:
    colour = COLOURS.get(condition.state)
    is_moving = condition.state == "running"
    return [
        f"[{colour}]{condition.state}[/]" if colour else condition.state,
        _steps(progress),
        "" if progress.loss is None else f"{progress.loss:.4f}",
        "" if progress.rate is None else f"{progress.rate:,.0f}",
        _clock(progress.left) if is_moving and progress.left is not None else "",
        str(condition.attempts or ""),
        str(condition.nodes or ""),
        condition.job.id if condition.job else "",
        escape(condition.note),
    ]


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
