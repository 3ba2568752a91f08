"""`rollcall status [RUN …]`: show a table of runs, live with --watch.

States come from the runs' files. Slurm is asked only about jobs that wait or run, and about those
that ended without a record. slurmdbd is not needed, and jobs that Slurm forgot are shown too.
"""

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollcall.launch.runs import find, states
from rollcall.launch.runs.states import Condition, Progress
from rollcall.run_dir import RunDir
from rollcall.text import coloured

EVERY = 5.0
"""Seconds between two updates while watching."""
NARROW = 110
"""In terminals with fewer characters, the table has fewer columns, and notes go below it."""
NOTE = 20
"""Characters that a note in the table needs at least."""
LEFT_OUT = ("samples/s", "attempts", "nodes", "")
COLOURS = {
    **{"running": "32", "done": "36", "pending": "33", "requeue": "33"},
    **{"failed": "31", "lost": "31", "stopped": "2", "unknown": "35"},
}
"""Codes of a terminal's colours: green, cyan, yellow, red, dim, magenta."""
HOME, CLEAR = "\x1b[H", "\x1b[J"
"""Move a terminal's cursor to its first line; erase what follows the cursor."""


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = find.parser("status", __doc__, nargs="*")
    parser.add_argument("--watch", action="store_true", help="keep the table live until Ctrl-C")
    options = parser.parse_args(argv)
    return show(options.run, options.root, options.watch)


def show(words: Sequence[str], root: str, is_live: bool) -> int:
    """Print the table of these runs or of all, live until Ctrl-C if asked; return the exit code."""
    if is_live:
        keep_live(lambda width: _table(_chosen(words, root), root, width))
        return 0
    found = _chosen(words, root)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(_table(found, root, width)) if found else f"there are no runs in {root}")
    for path in () if words else find.closed(root):
        print(f"{path.name}: cannot be read; it may be a run of another user")
    return 0


def keep_live(table: Callable[[int], list[str]]) -> None:
    """Print a table for the width of the terminal again and again, until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            size = shutil.get_terminal_size()
            lines = table(size.columns)
            # What is longer than the screen would scroll, and could not be drawn again.
            shown = [*lines[:1], *lines[1:][2 - size.lines :]] if sys.stdout.isatty() else lines
            print(HOME + CLEAR + "\n".join(shown), flush=True)
            time.sleep(EVERY)


def _chosen(words: Sequence[str], root: str) -> list[RunDir]:
    if not words:
        return find.find_all(root)
    return [run for word in words for run in find.with_cells(find.find(word, root).path)]


def _table(found: Sequence[RunDir], root: str, width: int | None) -> list[str]:
    """Return the lines of the table, for a terminal of this width or for a file."""
    conditions, complaint = states.look(found)
    base = f"{Path(root).absolute()}{os.sep}"
    rows = [["run", *cells_of(Condition(""), Progress())]]
    sweeps = {run.path for run in found} & {run.path.parent for run in found}
    cells: dict[Path, list[list[str]]] = {path: [] for path in sweeps}
    heads: dict[Path, list[str]] = {}
    for run, condition in zip(found, conditions, strict=True):
        if not (condition.is_live or condition.attempts) and find.is_sweep(run):
            condition = Condition("")  # its cells say everything
        name = str(run.path).removeprefix(base) if str(run.path).startswith(base) else run.name
        row = [name, *cells_of(condition, states.progress(run)).values()]
        if run.path in sweeps:
            heads[run.path] = row
        else:
            cells.get(run.path.parent, rows).append(row)
    for path, head in heads.items():
        states_of = Counter(row[1] for row in cells[path])
        counts = ", ".join(f"{count} {state}" for state, count in states_of.items())
        size = len(cells[path])
        texts = (f"{size} run{'s' * (size > 1)}: {counts}", head[-1])
        head[-1] = "; ".join(filter(None, texts))
        rows += [head, *cells[path]]
    return [*_lines(rows, width), *([complaint] if complaint else [])]


def _lines(rows: list[list[str]], width: int | None) -> list[str]:
    """Lay the rows out; the last cell of each is a note of any length."""
    names, below = rows[0], []
    if width is not None and width < NARROW:
        below = [f"{row[0]}: {row[-1]}" for row in rows[1:] if row[-1]]
        kept = [place for place, name in enumerate(names) if name not in LEFT_OUT]
        rows = [[*(row[place] for place in kept), ""] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    room = None if width is None else max(NOTE, width - sum(widths) - 2 * len(widths))
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]
        if row[1] in COLOURS:
            cells[1] = coloured(cells[1], COLOURS[row[1]])
        first, *more = textwrap.wrap(row[-1], room) if room and row[-1] else [row[-1]]
        indent = " " * (sum(widths) + 2 * len(widths))
        lines += ["  ".join([*cells, first]).rstrip(), *(indent + text for text in more)]
    return lines + below


def cells_of(condition: Condition, progress: Progress) -> dict[str, str]:
    """Return the cells of a row by column, without the name of the run."""
    is_moving = condition.state == "running"
    return {
        "state": condition.state,
        "step": _steps(progress),
        "loss": "" if progress.loss is None else f"{progress.loss:.4f}",
        "validation": _validation(progress.validation),
        "samples/s": "" if progress.rate is None else f"{progress.rate:,.0f}",
        "left": clock(progress.left) if is_moving and progress.left is not None else "",
        "attempts": str(condition.attempts or ""),
        "nodes": str(condition.nodes or ""),
        "job": condition.job.id if condition.job else "",
        "": condition.note,
    }


def _steps(progress: Progress) -> str:
    if progress.step is None:
        return ""
    if not progress.total:
        return str(progress.step)
    return f"{progress.step}/{progress.total} {progress.step / progress.total:4.0%}"


def _validation(figures: Mapping[str, float]) -> str:
    """Return the figure by which people compare runs: the accuracy, or else the loss."""
    if "accuracy" in figures:
        return f"{figures['accuracy']:.2%}"
    return f"{figures['loss']:.4f}" if "loss" in figures else ""


def clock(seconds: float) -> str:
    """Return a number of seconds as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
