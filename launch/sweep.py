"""`python -m launch sweep submit FILE` and `sweep status FILE`: many runs from one file.

The cells become tasks of an array job, each a run of its own in `runs/<sweep>/<cell>`. Submitting
the same file again runs the cells that are missing, have failed or were stopped, with the code that
the sweep began with. launch.cells tells what stands in the file.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch import cells, cluster, profile, runs, slurm, submission
from launch.cells import Cell, Sweep, SweepError
from launch.job import Job
from launch.submission import MISTAKES, TRAIN, Submission
from train.config import parse
from train.run import RunDir, read_lines

if TYPE_CHECKING:
    from rich.table import Table

EVERY = 5.0
"""Seconds between two looks while watching."""


def main(argv: Sequence[str]) -> int:
    """Submit a sweep or show its results; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch sweep",
        description=f"{__doc__}\n{cells.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    submit = commands.add_parser("submit", help="run the cells that are not done")
    submit.add_argument("--dry-run", action="store_true", help="print script and cells, no more")
    status = commands.add_parser("status", help="show the cells in a table")
    status.add_argument("--sort", metavar="COLUMN", help="loss, accuracy, step, a key, ...")
    status.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    status.add_argument("--watch", action="store_true", help="keep the table live until Ctrl-C")
    for command in (submit, status):
        command.add_argument("file", type=Path)
        command.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    given = parser.parse_args(argv)
    try:
        sweep = cells.read(given.file)
        if given.command == "status":
            return _status(sweep, given)
        return _submit(sweep, given, argv)
    except KeyboardInterrupt:
        return 0
    except (*MISTAKES, SweepError) as error:
        for text in str(error).splitlines():
            print(f"sweep: error: {text}", file=sys.stderr)
        return 2


def _submit(sweep: Sweep, given: argparse.Namespace, argv: Sequence[str]) -> int:
    if not slurm.is_available():
        raise SweepError("there is no sbatch here: a sweep is an array job of Slurm's")
    left = [
        cell
        for cell in sweep.cells
        if state(RunDir(Path(given.root) / sweep.name, cell.name)) != "done"
    ]
    if not left:
        submission.note(f"all {len(sweep.cells)} cells of {sweep.name} are done")
        return 0
    plan = _plan(sweep, given.root, left, argv)
    print(f"{len(left)} of {len(sweep.cells)} cells: {', '.join(cell.name for cell in left)}")
    if given.dry_run:
        submission.show(plan, local=False)
        return 0
    from launch import start  # here, because it imports submitit

    return start.start(plan, local=False)


def _plan(sweep: Sweep, root: str, left: Sequence[Cell], argv: Sequence[str]) -> Submission:
    """One array for all cells, or several, each after the one before, if they are too many."""
    own = profile.as_words(sweep.options)
    words = [*own, f"--name={sweep.name}", f"--root={root}", "--array=0", *sweep.program]
    line, setup = submission.read(words)
    base = submission.plan(line, argv, setup)
    at = base.job.command.index("--")
    is_training = base.job.command[at + 1 : at + 3] == TRAIN
    if is_training:
        for cell in left:
            parse([*base.job.command[at + 3 :], *cell.words(True)])  # refuses what train would
    size = int(cluster.configuration("MaxArraySize") or 1001)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    jobs: list[Job] = []
    files: dict[str, str] = {}
    for first in range(0, len(left), size):
        part = left[first : first + size]
        name = f"cells-{stamp}-{first}.json"
        files[name] = json.dumps(
            [{"name": cell.name, "words": cell.words(is_training)} for cell in part], indent=1
        )
        command = base.job.command
        command = (*command[:at], "--cells", str(base.run.job / name), *command[at:])
        throttle = f"%{sweep.throttle}" if sweep.throttle else ""
        array = {"array": f"0-{len(part) - 1}{throttle}"}
        jobs.append(replace(base.job, command=command, options={**base.job.options, **array}))
    # A sweep's own directory has no verdict: its cells have.
    return replace(base, job=jobs[0], later=tuple(jobs[1:]), files=files)


def state(run: RunDir) -> str:
    """How a cell stands: missing, done, failed, stopped, or unfinished without having said so."""
    verdict = run.read_verdict()
    if verdict is not None:
        return "stopped" if verdict.state == "requeue" else verdict.state
    attempts = runs.attempts(run)
    if attempts and attempts[-1].state is not None:
        return attempts[-1].state
    return "unfinished" if run.path.exists() else "missing"


def _status(sweep: Sweep, given: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = _rows(sweep, given)
    if given.csv is not None:
        try:
            with given.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise SweepError(f"--csv {given.csv}: {error.strerror}") from None
    if not given.watch:
        console.print(_table(rows))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_table(_rows(sweep, given)), refresh=True)
            time.sleep(EVERY)


def _rows(sweep: Sweep, given: argparse.Namespace) -> list[dict[str, str]]:
    """The cells in order, column by column."""
    keys = list(dict.fromkeys(key for cell in sweep.cells for key in cell.values))
    rows = [
        _row(cell, RunDir(Path(given.root) / sweep.name, cell.name), keys) for cell in sweep.cells
    ]
    sort = given.sort or sweep.sort or "loss"
    if sort not in rows[0]:
        raise SweepError(f"there is no column '{sort}' to sort by; there are {', '.join(rows[0])}")
    return sorted(rows, key=lambda row: _order(row[sort], largest_first=sort == "accuracy"))


def _table(rows: Sequence[dict[str, str]]) -> Table:
    from rich.table import Table

    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*row.values())
    return table


def _row(cell: Cell, run: RunDir, keys: Sequence[str]) -> dict[str, str]:
    metrics = runs.last_lines(run.metrics)
    evaluated = [line for line in read_lines(run.events) if line["event"] == "evaluated"]
    # The validation loss where there is one: cells are compared by it.
    found = {**(metrics[-1] if metrics else {}), **(evaluated[-1] if evaluated else {})}
    row = {"cell": cell.name, **{key: cell.values.get(key, "") for key in keys}}
    row["state"] = state(run)
    for name in ("step", "loss", "accuracy"):
        value = found.get(name)
        row[name] = "" if value is None else f"{value:.6g}"
    return row


def _order(text: str, largest_first: bool) -> tuple[int, float, str]:
    try:
        return (0, -float(text) if largest_first else float(text), "")
    except ValueError:
        return (1, 0.0, text)
