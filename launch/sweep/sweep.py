"""`rollcall sweep submit FILE` and `sweep status FILE`: many runs from one file.

Each cell becomes a task of an array job and a separate run in `runs/<sweep>/<cell>`. Without Slurm
the cells run on this machine, as many at a time as fit or as `throttle` says. If you submit
the same file again, the cells that are missing, failed or stopped run again, with the code of the
first submission.
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.config import parse
from rollcall.installation import training_words
from rollcall.launch.commands import status
from rollcall.launch.runs import find
from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import command, layers, profile
from rollcall.launch.submission.plan import plan
from rollcall.launch.submission.submission import Submission, note
from rollcall.launch.sweep import definition
from rollcall.launch.sweep.definition import Cell, Sweep
from rollcall.parser import parser as command_parser
from rollcall.records.job import Cell as CellRecord
from rollcall.records.run import LoggedStep, Validation
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir
from rollcall.text import did_you_mean, table


def main(argv: Sequence[str]) -> int:
    """Submit a sweep or show its results; return the exit code."""
    parser = command_parser("sweep", f"{__doc__}\n{definition.__doc__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    submit = commands.add_parser("submit", help="run the cells that are not done yet")
    dry_run = "print the script and the cells, submit nothing"
    submit.add_argument("--dry-run", action="store_true", help=dry_run)
    on_this = "run the cells on this machine, even if it has Slurm"
    submit.add_argument("--local", action="store_true", help=on_this)
    results = commands.add_parser("status", help="show the cells in a table")
    columns = "val_loss, val_accuracy, loss, step, a key, ..."
    results.add_argument("--sort", metavar="COLUMN", help=columns)
    written = "also write the table to this file"
    results.add_argument("--csv", type=Path, metavar="FILE", help=written)
    results.add_argument("--watch", action="store_true", help="update the table until Ctrl-C")
    for action in (submit, results):
        action.add_argument("file", type=Path)
        action.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    given = parser.parse_args(argv)
    sweep = definition.read(given.file)
    return _status(sweep, given) if given.command == "status" else _submit(sweep, given, argv)


def _submit(sweep: Sweep, given: argparse.Namespace, argv: Sequence[str]) -> int:
    local = given.local or not slurm.is_available()
    root = Path(given.root) / sweep.name
    left = [cell for cell in sweep.cells if state(RunDir(root, cell.name)) != "done"]
    if not left:
        note(f"all {len(sweep.cells)} cells of {sweep.name} are done")
        return 0
    planned = _plan(sweep, given.root, left, argv, local)
    print(f"{len(left)} of {len(sweep.cells)} cells: {', '.join(cell.name for cell in left)}")
    return command.carry_out(planned, local, given.dry_run)


def _plan(
    sweep: Sweep, root: str, left: Sequence[Cell], argv: Sequence[str], local: bool
) -> Submission:
    """Plan one array for all cells; if they are too many, several arrays one after the other."""
    own = profile.as_words(sweep.options) + (["--local"] if local else [])
    words = [*own, f"--name={sweep.name}", f"--root={root}", "--array=0", *sweep.program]
    line, setup = layers.read(words, "the sweep's file")
    base = plan(line, argv, setup)
    at = base.job.command.index("--")
    words_of_training = training_words(base.job.command[at + 1 :])
    trains = words_of_training is not None
    for cell in left if trains else ():
        parse([*(words_of_training or ()), *cell.words(True)])  # raises what training would
    size = len(left) if local else int(cluster.configuration("MaxArraySize") or 1001)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    jobs: list[Job] = []
    files: dict[str, str] = {}
    for first in range(0, len(left), size):
        part = left[first : first + size]
        name = CellRecord.file_name(stamp, first)
        cells = [CellRecord(cell.name, list(cell.words(trains))) for cell in part]
        files[name] = json.dumps([cell.as_dict() for cell in cells], indent=1)
        where = f"--cells={base.run.job / name}"
        supervised = (*base.job.command[:at], where, *base.job.command[at:])
        batch = (*base.job.batch, where)
        throttle = f"%{sweep.throttle}" if sweep.throttle else ""
        options = {**base.job.options, "array": f"0-{len(part) - 1}{throttle}"}
        jobs.append(replace(base.job, command=supervised, batch=batch, options=options))
    # The sweep's own directory has no verdict; only its cells have one.
    return replace(base, job=jobs[0], later=tuple(jobs[1:]), files=files)


def state(run: RunDir) -> str:
    """Return a cell's state: missing, done, failed, stopped, or unfinished."""
    if verdict := run.read_verdict():
        return "stopped" if verdict.state == "requeue" else verdict.state
    attempts = find.attempts(run)
    if attempts and attempts[-1].state is not None:
        return attempts[-1].state
    return "unfinished" if run.path.exists() else "missing"


def _status(sweep: Sweep, given: argparse.Namespace) -> int:
    rows = _rows(sweep, given)
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if given.watch:
        status.keep_live(lambda width: [row[:width] for row in _table(_rows(sweep, given))])
    else:
        print("\n".join(_table(rows)))
    return 0


def _rows(sweep: Sweep, given: argparse.Namespace) -> list[dict[str, str]]:
    keys = list(dict.fromkeys(key for cell in sweep.cells for key in cell.values))
    root = Path(given.root) / sweep.name
    rows = [_row(cell, RunDir(root, cell.name), keys) for cell in sweep.cells]
    compared = "val_loss" if any(row["val_loss"] for row in rows) else "loss"
    sort = given.sort or sweep.sort or compared
    if sort not in rows[0]:
        hint = did_you_mean(f"val_{sort}", rows[0]) or f": the columns are {', '.join(rows[0])}"
        raise RefusedError(f"cannot sort by '{sort}'{hint}")
    return sorted(rows, key=lambda row: _order(row[sort], largest_first=sort == "val_accuracy"))


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


def _row(cell: Cell, run: RunDir, keys: Sequence[str]) -> dict[str, str]:
    newest = [*Validation.read(run.path)[-1:], LoggedStep.newest(run.path)]
    found = {name: value for line in newest if line for name, value in line.as_dict().items()}
    row = {"cell": cell.name, **{key: cell.values.get(key, "") for key in keys}}
    row["state"] = state(run)
    for name in ("step", "loss", "val_loss", "val_accuracy"):
        value = found.get(name)
        row[name] = "" if value is None else f"{value:.6g}"
    return row


def _order(text: str, largest_first: bool) -> tuple[bool, float]:
    """Return what to sort a cell's value by; what is no number comes last, NaN too."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_none = math.isnan(number)
    return is_none, 0.0 if is_none else -number if largest_first else number
