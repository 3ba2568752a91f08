"""Which runs are there, and what do their files say? Names to directories, attempts, jobs, ends."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from train.run import RunDir, read_lines

TAIL = 16384
"""Bytes that are read of the end of a file."""


class NoRunError(Exception):
    """There is no such run, or nothing in it that was asked for; the message says what is there."""


@dataclass
class Attempt:
    """One start of a run on all its nodes.

    Attributes:
        job: the id of its job.
        hosts: its nodes, in order.
        ranks: of all nodes together.
        started: seconds since 1970.
        state: finished, stopped or failed; None if the head has not come to say so.
    """

    number: int
    job: str
    hosts: list[str]
    ranks: int
    started: float
    state: str | None = None


@dataclass(frozen=True)
class Job:
    """A job of a run.

    Attributes:
        submitted: seconds since 1970; for a job that was submitted by hand, when it started.
        is_local: whether it runs on this machine instead of under Slurm.
    """

    id: str
    submitted: float
    is_local: bool


def parser(command: str, meaning: str | None, nargs: str | None = None) -> argparse.ArgumentParser:
    """The command line of a command about runs: `run`, a list if `nargs` says so, and `root`."""
    result = argparse.ArgumentParser(
        prog=f"python -m launch {command}", description=meaning, allow_abbrev=False
    )
    result.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    meaning_of_run = "its name under --root, or its directory"
    result.add_argument("run", metavar="RUN", nargs=nargs, help=meaning_of_run)
    return result


def refuse(command: str, error: Exception | str) -> int:
    """Say why a command does nothing; return the exit code for that."""
    print(f"{command}: error: {error}", file=sys.stderr)
    return 2


def find(word: str, root: str) -> RunDir:
    """The run of this name under root, or in this directory.

    Raises:
        NoRunError: there is none.
    """
    for path in (Path(root) / word, Path(os.path.abspath(word))):  # noqa: PTH100 - without ".."
        if _is_run(path):
            return RunDir(path.parent, path.name)
    near = difflib.get_close_matches(word, [run.name for run in find_all(root)], n=1)
    hint = f", did you mean '{near[0]}'?" if near else "; python -m launch status lists all"
    raise NoRunError(f"there is no run '{word}' in {Path(root).absolute()}{hint}")


def find_all(root: str) -> list[RunDir]:
    """All runs under root, sweeps and their cells too; the one that changed last comes last."""
    found = [run for path in _runs_in(Path(root)) for run in with_cells(path)]
    return sorted(found, key=lambda run: run.path.stat().st_mtime)


def with_cells(path: Path) -> list[RunDir]:
    """The run in this directory; if it is the place of a sweep or an array, those in it too."""
    run = RunDir(path.parent, path.name)
    cells = _runs_in(path) if is_sweep(run) else []
    return [run, *(RunDir(path, cell.name) for cell in cells)]


def is_sweep(run: RunDir) -> bool:
    """Whether this is the place of a sweep or an array, whose cells or tasks are runs in it."""
    return any(run.job.glob("cells-*.json")) or any(run.path.glob("task-*/job"))


def _runs_in(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if _is_run(path)] if place.is_dir() else []


def _is_run(path: Path) -> bool:
    return (path / "job").is_dir() or (path / "config.yaml").is_file()


def attempts(run: RunDir) -> list[Attempt]:
    """All attempts, in order."""
    found: dict[int, Attempt] = {}
    for line in read_lines(run.job / "attempts.jsonl"):
        if line["event"] == "started":
            found[line["attempt"]] = Attempt(
                line["attempt"], line["job"], line["hosts"], line["ranks"], line["time"]
            )
        elif line["event"] == "ended" and line["attempt"] in found:
            found[line["attempt"]].state = line["state"]
    return [found[number] for number in sorted(found)]


def jobs(run: RunDir) -> list[Job]:
    """All jobs of a run, in the order in which they were submitted."""
    times = {line["job"]: line["time"] for line in read_lines(run.job / "submissions.jsonl")}
    for attempt in attempts(run):
        times.setdefault(attempt.job, attempt.started)
    # Without Slurm a job's id is a process of submitit's, or a date: see launch.node.find.
    processes = {path.name.partition("_")[0] for path in run.job.glob("*_log.out")}
    return [
        Job(job, time, "-" in job or job in processes)
        for job, time in sorted(times.items(), key=lambda item: item[1])
    ]


def newest_job(run: RunDir) -> Job | None:
    """The job that was submitted last, or that started last if it was submitted by hand."""
    return next(iter(jobs(run)[-1:]), None)


def local_processes(run: RunDir, job: Job) -> list[int]:
    """The processes on this machine that start a local job's nodes; none once it has ended."""
    ours: dict[int, int] = {}
    place = run.path.resolve()
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        # submitit's controller has the run's job/ as its argument; a supervisor started by hand
        # is the parent of an agent that writes the run's logs.
        if job.id == str(process.pid) and words and Path(words[-1]).resolve() == place / "job":
            return [process.pid]
        logs = log_directory(words) if "-" in job.id else None
        if logs is not None and place in logs.parents:
            ours[process.pid] = process.info["ppid"]
    return sorted(set(ours.values()) - set(ours))


def log_directory(words: Sequence[str]) -> Path | None:
    """Where an agent or rank with this command line writes its logs; None for other processes."""
    option = "--log-dir="
    found = next((word for word in words if word.startswith(option)), None)
    return None if found is None else Path(found.removeprefix(option)).resolve()


def cancelled(run: RunDir) -> set[str]:
    """The jobs that `python -m launch cancel` has ended."""
    return {job for line in read_lines(run.job / "cancelled.jsonl") for job in line["jobs"]}


def failures(run: RunDir, attempt: Attempt) -> list[dict[str, Any]]:
    """What the ranks and agents of an attempt have written about their failures, by time.

    Besides what train.agent writes: `node`, and `who`, which is `agent` or `rank-<n>`.
    """
    place = run.path / "logs" / f"attempt-{attempt.number}"
    found = []
    for path in place.glob("node-*/*.failed.json"):
        node = int(path.parent.name.removeprefix("node-"))
        who = path.name.removesuffix(".failed.json")
        found.append({**json.loads(path.read_text()), "node": node, "who": who})
    return sorted(found, key=lambda failure: failure["time"])


def tail(path: Path) -> list[str]:
    """The last lines of a file, whole ones; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            start = file.tell()
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if start else lines


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last objects of a line file."""
    found = []
    for line in tail(path):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # cut off by a crash
    return found
