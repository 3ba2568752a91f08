"""`rollcall sweep submit FILE` and `sweep status FILE`: many runs from one file.

Each cell becomes a task of an array job and a separate run in `runs/<sweep>/<cell>`. Without Slurm,
the cells run on this machine, as many at once as fit or as `throttle` allows. If you submit the
same file again, the cells that are missing, failed or stopped run again, with the code of the first
submission.
"""

import csv
import json
import math
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.cli.installation import training_words
from rollcall.cli.parser import parser as command_parser
from rollcall.config import parse, trust
from rollcall.launch.commands import status
from rollcall.launch.runs import find, states
from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import command, layers, resources
from rollcall.launch.submission.plan import SubmissionPlan, absolute_paths, check_training, plan
from rollcall.launch.sweep import definition
from rollcall.launch.sweep.definition import Sweep, SweepCell
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean, note, table, word
from rollcall.records.job import Cell as CellRecord
from rollcall.records.run import LoggedStep, Validation
from rollcall.records.run_dir import RunDir


def main(argv: Sequence[str]) -> int:
    """Submit a sweep or show its results; return the exit code."""
    parser = command_parser("sweep", f"{__doc__}\n{definition.__doc__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    submit = commands.add_parser("submit", help="run the cells that are not done yet")
    add = submit.add_argument
    add("--dry-run", action="store_true", help="print the script and the cells, submit nothing")
    add("--local", action="store_true", help="run the cells on this machine, even if it has Slurm")
    results = commands.add_parser("status", help="show the cells in a table")
    add = results.add_argument
    add("--sort", metavar="COLUMN", help="val_loss, val_accuracy, loss, step, a key, ...")
    add("--csv", type=Path, metavar="FILE", help="also write the table to this file")
    add("--watch", action="store_true", help="update the table until Ctrl-C")
    for action in (submit, results):
        action.add_argument("file", type=Path, help="the sweep's YAML file")
        action.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    given = parser.parse_args(argv)
    sweep = definition.read(given.file)
    return _status(sweep, given) if given.command == "status" else _submit(sweep, given, argv)


def _submit(sweep: Sweep, given: Namespace, argv: Sequence[str]) -> int:
    trust.require_owner(given.file, "the sweep")
    if "--" not in sweep.program or training_words(sweep.program[1:]) is not None:
        words = [word for cell in sweep.cells for word in cell.words(True)]
        trust.check_words([*sweep.program, *words], given.file)
    local = given.local or not slurm.is_available()
    root = Path(given.root) / sweep.name
    runs = [RunDir(root, cell.name) for cell in sweep.cells]
    states_of = [states.state_of(run.read_verdict(), find.newest_attempt(run)) for run in runs]
    left = [cell for cell, end in zip(sweep.cells, states_of, strict=True) if end != "done"]
    if not left:
        note(f"all {len(sweep.cells)} cells of {sweep.name} are done")
        return 0
    planned = _plan(sweep, given.root, left, argv, local)
    print(f"{len(left)} of {len(sweep.cells)} cells: {', '.join(cell.name for cell in left)}")
    return command.carry_out(planned, local, given.dry_run)


def _plan(
    sweep: Sweep, root: str, left: Sequence[SweepCell], argv: Sequence[str], local: bool
) -> SubmissionPlan:
    """Plan one array for all cells, or consecutive arrays if Slurm limits their size."""
    given = layers.as_words(sweep.options) + (["--local"] if local else [])
    words = [*given, f"--name={sweep.name}", f"--root={root}", "--array=0", *sweep.program]
    line, setup = layers.read(words, "the sweep's file")
    base = plan(line, argv, setup, is_sweep=True)
    line = resources.spread(line)
    at = base.job.command.index("--")
    trained = training_words(base.job.command[at + 1 :])
    remarks: dict[str, None] = {}
    further = {cell.name: cell.words(trained is not None) for cell in left}
    for cell in left if trained is not None else ():
        words = [*(training_words(line.program) or line.own.words), *cell.words(True)]
        words += [word("run.root", str(base.run.path)), word("run.name", cell.name)]
        config = parse(words)[1]
        remarks |= dict.fromkeys(check_training(line, setup, config))
        paths = absolute_paths(config)  # of a key of the cell: its word comes after the sweep's
        further[cell.name] += [path for path in paths if path.partition("=")[0] in cell.values]
    for remark in remarks:
        note(remark)
    size = len(left) if local else int(cluster.configuration("MaxArraySize") or 1001)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    jobs: list[Job] = []
    files: dict[str, str] = {}
    for first in range(0, len(left), size):
        part = left[first : first + size]
        name = CellRecord.file_name(stamp, first)
        cells = [CellRecord(cell.name, further[cell.name]) for cell in part]
        files[name] = json.dumps([cell.as_dict() for cell in cells], indent=1)
        option = f"--cells={base.run.job / name}"
        supervised = (*base.job.command[:at], option, *base.job.command[at:])
        batch = (*base.job.batch, option)
        throttle = f"%{sweep.throttle}" if sweep.throttle else ""
        options = {**base.job.options, "array": f"0-{len(part) - 1}{throttle}"}
        jobs.append(replace(base.job, command=supervised, batch=batch, options=options))
    # The sweep's own directory has no verdict; only its cells have one.
    return replace(base, job=jobs[0], later=tuple(jobs[1:]), files=files)


def _status(sweep: Sweep, given: Namespace) -> int:
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


def _rows(sweep: Sweep, given: Namespace) -> list[dict[str, str]]:
    keys = list(dict.fromkeys(key for cell in sweep.cells for key in cell.values))
    root = Path(given.root) / sweep.name
    runs = [RunDir(root, cell.name) for cell in sweep.cells]
    conditions, _ = states.look(runs)
    rows = [
        _row(cell, run, keys, condition.state if run.path.exists() else "waiting")
        for cell, run, condition in zip(sweep.cells, runs, conditions, strict=True)
    ]
    compared = "val_loss" if any(row["val_loss"] for row in rows) else "loss"
    sort = given.sort or sweep.sort or compared
    if sort not in rows[0]:
        hint = did_you_mean(f"val_{sort}", rows[0]) or f": the columns are {', '.join(rows[0])}"
        raise RefusedError(f"cannot sort by '{sort}'{hint}")
    # A narrow terminal cuts off the last columns.
    rows = [{"cell": row["cell"], sort: row[sort], **row} for row in rows]
    return sorted(rows, key=lambda row: _order(row[sort], largest_first=sort == "val_accuracy"))


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    four = [name for name in ("loss", "val_loss", "val_accuracy") if name in rows[0]]
    rows = [row | {key: f"{float(row[key]):.4g}" for key in four if row[key]} for row in rows]
    shown = [[*row.values()] for row in rows]
    return table([list(rows[0]), *shown], right=True)


def _row(cell: SweepCell, run: RunDir, keys: Sequence[str], state: str) -> dict[str, str]:
    newest = [*Validation.read(run.path)[-1:], LoggedStep.newest(run.path)]
    figures = {name: value for line in newest if line for name, value in line.as_dict().items()}
    row = {"cell": cell.name, **{key: cell.values.get(key, "") for key in keys}}
    row["state"] = state
    verdict = run.read_verdict()
    if verdict is not None and verdict.state == "done" and verdict.step:
        figures["step"] = verdict.step  # not every step is logged
    for name in ("step", "loss", "val_loss", "val_accuracy"):
        value = figures.get(name)
        row[name] = "" if value is None else f"{value:.6g}"
    return row


def _order(text: str, largest_first: bool) -> tuple[bool, float]:
    """Return the sort key of a value; NaN and values that are not numbers come last."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        return True, 0.0
    return False, -number if largest_first else number
