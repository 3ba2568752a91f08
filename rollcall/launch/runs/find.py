"""Find runs by name, and read their attempts, jobs and failures."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean
from rollcall.records.attempt import AttemptRecord, RanksAlone
from rollcall.records.job import Cancellation, Cell, Submission, local_jobs
from rollcall.records.run_dir import RunDir
from rollcall.system.files import changed, is_there, listed
from rollcall.system.timer import in_time


class NoRunError(RefusedError):
    """The run, or the part of it that was asked for, does not exist; the message says what does."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job of a run."""

    id: str
    is_local: bool  # whether it runs on this machine instead of under Slurm


def parser(command: str, meaning: str | None, nargs: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for a command about runs; `run` is a list if `nargs` says so."""
    result = command_parser(command, meaning)
    result.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    meaning_of_run = "its name under --root, or its directory"
    result.add_argument("run", metavar="RUN", nargs=nargs, help=meaning_of_run)
    return result


def find(word: str, root: str) -> RunDir:
    """Find the run of this name under root, or in this directory; raise NoRunError without one."""
    for path in (Path(root) / word, Path(os.path.abspath(word))):  # noqa: PTH100 - without ".."
        if _is_run(path):
            return RunDir(path.parent, path.name)
    known = [os.path.relpath(run.path, root) for run in find_all(root)]  # also CELL of a sweep
    lists = "; rollcall status lists all" if known else ", which has no runs; set --root"
    hint = did_you_mean(word, known) or lists
    if Path(root, word) in closed(root):
        hint = " that you may read: another user may own it"
    raise NoRunError(f"there is no run '{word}' in {Path(root).absolute()}{hint}")


def find_one(word: str, root: str) -> RunDir:
    """Find the run of this name like `find`; raise NoRunError if it is a sweep too."""
    run = find(word, root)
    if is_sweep(run):
        raise NoRunError(f"{run.name} is a sweep: name one of its runs, {run.name}/CELL")
    return run


def typed(run: RunDir) -> str:
    """Return a name of a run by which `find` finds it without --root in this directory."""
    root = Path.cwd() / "runs"
    inside = root in run.path.parents
    return str(run.path.relative_to(root) if inside else run.path)


def find_all(root: str) -> list[RunDir]:
    """Find all runs under root, sweeps and their cells too; the one changed last comes last.

    A directory that does not answer is left out; `timer.hanging` has it.
    """
    if root != "runs" and not Path(root).is_dir():  # the first run makes the default
        raise NoRunError(f"{Path(root).absolute()} is not a folder; expected the one with the runs")
    dated: list[tuple[float, RunDir]] = []
    for path in listed(Path(root).absolute(), "*"):
        dated += in_time(path, _runs_of) or []
    return [run for _, run in sorted(dated, key=lambda entry: entry[0])]


def _runs_of(path: Path) -> list[tuple[float, RunDir]]:
    return [(changed(run.path), run) for run in (with_cells(path) if _is_run(path) else [])]


def closed(root: str) -> list[Path]:
    """Return the directories under root that this user may not look into."""
    folders = [path for path in listed(Path(root), "[!.]*") if path.is_dir()]
    return [path for path in folders if not os.access(path, os.R_OK | os.X_OK)]


def with_cells(path: Path) -> list[RunDir]:
    """Return the run in this directory, and if it is a sweep or an array, those in it too."""
    run = RunDir(path.parent, path.name)
    cells = listed(path, "*") if is_sweep(run) else []
    return [run, *(RunDir(path, cell.name) for cell in cells if _is_run(cell))]


def is_sweep(run: RunDir) -> bool:
    """Return True for a sweep or an array, whose cells or tasks are runs in its directory."""
    tasks = listed(run.path, "task-*")
    return Cell.are_in(run.path) or any(is_there(task / "job") for task in tasks)


def _is_run(path: Path) -> bool:
    return os.access(f"{path}/job/.", os.F_OK) or is_there(path / "config.yaml")


def attempts(run: RunDir) -> list[AttemptRecord]:
    """Read all attempts, in order."""
    return AttemptRecord.read(run.path)


def newest_attempt(run: RunDir) -> AttemptRecord | None:
    """Return the attempt that started last; None if there was none."""
    return next(iter(attempts(run)[-1:]), None)


def jobs(run: RunDir, known: Sequence[AttemptRecord] | None = None) -> list[SubmittedJob]:
    """Return all jobs of a run in the order of their submission; `known` has its attempts."""
    times = {record.job: record.time for record in Submission.read(run.path)}
    for attempt in attempts(run) if known is None else known:
        times.setdefault(attempt.job, attempt.started)
    # Without Slurm, a job's id is submitit's process id or a date: see node.identity.find.
    processes = local_jobs(run.job)
    ids = sorted(times, key=times.__getitem__)
    return [SubmittedJob(job, "-" in job or job in processes) for job in ids]


def cancelled(run: RunDir) -> set[str]:
    """Return the ids of the jobs that `rollcall cancel` has ended."""
    return {job for record in Cancellation.read(run.path) for job in record.jobs}


def alone(run: RunDir, newest: AttemptRecord | None = None) -> RanksAlone | None:
    """Return the record of ranks that never met in the newest attempt, which may be given."""
    newest = newest or newest_attempt(run)
    return RanksAlone.read(run.attempt_logs(newest.number) / "node-0") if newest else None
