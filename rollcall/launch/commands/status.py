"""`rollcall status [RUN …]`: show a table of runs; `rollcall watch` keeps it live.

States come from the runs' files. Slurm is asked only about jobs that wait or run, and about those
that ended without a record. slurmdbd is not needed, and jobs that Slurm forgot are shown too.
"""

import contextlib
import os
import select
import shutil
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rollcall.launch.runs import find, states
from rollcall.messages.text import coloured, counted, fixed
from rollcall.system.timer import hanging

NARROW = 110
"""In terminals with fewer characters, the table has fewer columns, and notes go below it."""
MIN_NOTE = 20
"""Smallest width of a note in the table, in characters."""
LEFT_OUT = ("samples/s", "attempts", "nodes", "")
"""Columns that a narrow terminal does not show."""
SPARED = ("job", "left", "validation")
"""Columns that it leaves out too, one after the other, until a row fits."""
COLOURS = {
    **{"running": "32", "done": "36", "pending": "33", "requeue": "33"},
    **{"failed": "31", "lost": "31", "stopped": "2", "unknown": "35"},
}
"""Codes of a terminal's colours: green, cyan, yellow, red, dim, magenta."""
REDRAW, LOOK = 5.0, 0.5
"""Seconds between two tables, and between two looks for a key or a reason to draw one earlier."""
HOME, CLEAR = b"\x1b[H", b"\x1b[J"
"""Move a terminal's cursor to its first line; erase what follows the cursor."""


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    options = find.parser("status", __doc__, nargs="*").parse_args(argv)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(lines(options.run, options.root, width)))
    for path in () if options.run else find.closed(options.root):
        print(f"{path.name}: cannot be read; it may be a run of another user")
    return 0


def keep_live(table: Callable[[int], list[str]], sign: Callable[[], object] = int) -> None:
    """Print a table for the terminal's width until `q` or Ctrl-C, at once if `sign` has changed."""
    with contextlib.suppress(KeyboardInterrupt), _keys() as is_ended:
        while True:
            seen, end = sign(), time.monotonic() + REDRAW
            size = shutil.get_terminal_size()
            lines = table(size.columns)
            # A table longer than the screen would scroll: its first rows are left out.
            shown = [*lines[:1], *lines[1:][2 - size.lines :]] if sys.stdout.isatty() else lines
            sys.stdout.buffer.write(HOME + CLEAR)  # which no record may
            print("\n".join(shown), flush=True)
            while time.monotonic() < end and sign() == seen:
                if is_ended():
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Yield a function that waits for LOOK seconds, and returns True if `q` was pressed."""

    def is_ended() -> bool:
        if not select.select([0], [], [], LOOK)[0]:
            return False
        keys = os.read(0, 99)  # nothing if the terminal is gone
        return not keys or b"q" in keys

    is_ours = False
    with contextlib.suppress(OSError):  # or the shell would stop this process
        is_ours = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    if not is_ours:
        yield lambda: bool(select.select([], [], [], LOOK)[0])
        return
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield is_ended
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def lines(words: Sequence[str], root: str, width: int | None) -> list[str]:
    """Return the table of the named runs or of all, for a terminal of this width; None: a file."""
    named = (run for word in words for run in find.with_cells(find.find(word, root).path))
    runs = list(named) if words else find.find_all(root)
    below = hanging(Path(root).absolute())
    silent = [f"{path} does not answer: is its file system available?" for path in below]
    if not (runs or silent):
        return [f"there are no runs in {Path(root).absolute()}; --root names another directory"]
    conditions, complaint = states.look(runs)
    base = f"{Path(root).absolute()}{os.sep}"
    rows = [["run", *cells_of(states.Condition(""), states.Progress())]]
    sweeps = {run.path for run in runs} & {run.path.parent for run in runs}
    cells: dict[Path, list[list[str]]] = {path: [] for path in sweeps}
    heads: dict[Path, list[str]] = {}
    for run, condition in zip(runs, conditions, strict=True):
        if not (condition.is_live or condition.attempts) and find.is_sweep(run):
            condition = states.Condition("")  # its cells show everything
        name = str(run.path).removeprefix(base) if str(run.path).startswith(base) else run.name
        row = [name, *cells_of(condition, states.progress(run, condition)).values()]
        if run.path in sweeps:
            heads[run.path] = row
        else:
            cells.get(run.path.parent, rows).append(row)
    for path, head in heads.items():
        states_of = Counter(row[1] for row in cells[path])
        counts = ", ".join(f"{count} {state}" for state, count in states_of.items())
        total = f"{counted(len(cells[path]), 'run')}: {counts}"
        head[-1] = "; ".join(filter(None, (total, head[-1])))
        rows += [head, *cells[path]]
    return [*_lines(rows, width), *silent, *([complaint] if complaint else [])]


def _lines(rows: list[list[str]], width: int | None) -> list[str]:
    """Lay out the rows; the last cell of each is a note of any length."""
    names, below = rows[0], []
    if width is not None and width < NARROW:
        below = [f"{row[0]}: {row[-1]}" for row in rows[1:] if row[-1]]
        kept = [column for column, name in enumerate(names) if name not in LEFT_OUT]
        for name in SPARED:
            if sum(max(len(row[column]) for row in rows) + 2 for column in kept) > width + 2:
                kept.remove(names.index(name))
        rows = [[*(row[column] for column in kept), ""] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    indent = sum(widths) + 2 * len(widths)
    room = None if width is None else max(MIN_NOTE, width - indent)
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]
        if row[1] in COLOURS:
            cells[1] = coloured(cells[1], COLOURS[row[1]])
        first, *more = textwrap.wrap(row[-1], room) if room and row[-1] else [row[-1]]
        lines += ["  ".join([*cells, first]).rstrip(), *(" " * indent + text for text in more)]
    return lines + below


def cells_of(condition: states.Condition, progress: states.Progress) -> dict[str, str]:
    """Return the cells of a row by column, without the name of the run."""
    is_moving = condition.state == "running"
    return {
        "state": condition.state,
        "step": _steps(progress),
        "loss": "" if progress.loss is None else fixed(progress.loss),
        "validation": _validation(progress.validation),
        "samples/s": "" if progress.rate is None else f"{progress.rate:,.0f}",
        "left": str(progress.left) if is_moving and progress.left is not None else "",
        "attempts": str(condition.attempts or ""),
        "nodes": str(condition.nodes or ""),
        "job": condition.job.id if condition.job else "",
        "": "; ".join(filter(None, (condition.note, condition.restarts))),
    }


def _steps(progress: states.Progress) -> str:
    if progress.step is None:
        return ""
    if not progress.total:
        return f"{progress.step:,}"
    return f"{progress.step:,}/{progress.total:,} {progress.step / progress.total:4.0%}"


def _validation(figures: Mapping[str, float]) -> str:
    """Return the figure by which people compare runs: the accuracy, or else the loss."""
    if "accuracy" in figures:
        return f"{figures['accuracy']:.2%}"
    return fixed(figures["loss"]) if "loss" in figures else ""
