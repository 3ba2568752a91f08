"""Everything that a report says about one run, read from its directory."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollcall.config import ConfigError, describe, origins, yaml_values
from rollcall.config.read import is_file
from rollcall.installation import training_words
from rollcall.launch.commands.why import LINES, damage
from rollcall.launch.runs import find, root_cause, states
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.runs.root_cause import RootCause
from rollcall.launch.runs.states import Condition, Progress
from rollcall.records.attempt import AttemptRecord
from rollcall.records.code import CodeRecord
from rollcall.records.files import changed, tail
from rollcall.records.files import listed as paths_in
from rollcall.records.job import Cell, JobRecord, Restart, Submission
from rollcall.records.run import LoggedStep, Validation
from rollcall.run_dir import RunDir
from rollcall.text import dotted, listed

FAULTS = (
    *("failed", "skipped", "rolled_back", "overflowed", "diverged", "out_of_memory", "straggler"),
    *("save_failed", "save_delayed", "refused"),
)
KINDS = {
    **{"resumed": "restart", "checkpointed": "checkpoint", "evaluated": "evaluation"},
    **{"signalled": "signal", **dict.fromkeys(FAULTS, "fault")},
}
"""What an event is called in a report, by its name."""
NOT_CURVES = ("epoch", "slowest_rank", "unreadable", "step", "time")
"""Numbers of a logged step that are no curve."""
LAST_STEP = 10**12
"""Greater steps are damage."""

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: str  # one of the values of KINDS
    text: str


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed."""

    title: str
    cause: RootCause
    lines: list[str]  # the end of the log, if there is one


@dataclass(frozen=True)
class Story:
    """What a report says about a run."""

    run: RunDir
    name: str
    sweep: str  # the name of the sweep that it is a cell of; empty if it is none
    condition: Condition
    progress: Progress
    curves: dict[str, Points]  # by name, as in metrics.jsonl, in the order of steps
    marks: list[Mark]
    cell: dict[str, str]  # the values that its sweep chose, by key; empty without a sweep
    settings: dict[str, tuple[str, str]]  # value and origin of each key; empty for other programs
    facts: dict[str, str]  # code, environment and machines
    attempts: list[list[str]]  # a table of them, with a first row of titles; empty without any
    failures: list[Failure]
    notes: list[str]  # what is missing or could not be read
    started: float | None = None  # seconds since 1970
    newest: float = 0.0  # when its files last changed
    result: dict[str, float] = field(default_factory=dict)  # newest value of each curve


def chosen(words: Sequence[str], root: str) -> list[RunDir]:
    """Return the runs of these names, a sweep's cells in its place; raise NoRunError without."""
    found = []
    for word in words:
        run, *cells = find.with_cells(find.find(word, root).path)
        if find.is_sweep(run) and not cells:
            raise NoRunError(f"the sweep {run.name} has no runs yet; see rollcall status {word}")
        found += cells or [run]
    return list({run.path: run for run in found}.values())


def tell(found: Sequence[RunDir]) -> list[Story]:
    """Read these runs. Whatever their files hold, nothing is raised."""
    conditions, complaint = states.look(found)
    parents = [run.path.parent.name if _is_cell(run) else "" for run in found]
    is_one = len(set(parents)) == 1  # then the name of the sweep is not repeated
    stories = []
    for run, condition, parent in zip(found, conditions, parents, strict=True):
        name = f"{parent}/{run.name}" if parent and not is_one else run.name
        stories.append(_tell(run, name, parent, condition, complaint))
    return stories


def _tell(run: RunDir, name: str, sweep: str, condition: Condition, complaint: str) -> Story:
    curves = _curves(run)
    attempts = find.attempts(run)
    events = run.read_events()
    notes = [complaint] if complaint else []
    if not any(curves.values()):
        notes.append(
            "This run has no metrics.jsonl with lines of steps, so there are no curves. A program "
            "of yours writes them with LoggedStep(...).append(directory); see docs/report.md."
        )
    times = [attempt.started for attempt in attempts]
    times += [event["time"] for event in events[:1]]
    return Story(
        run=run,
        name=name,
        sweep=sweep,
        condition=condition,
        progress=states.progress(run),
        curves=curves,
        marks=list(_marks(events)),
        cell=_cell(run),
        settings=_settings(run),
        facts=_facts(run, events),
        attempts=_table(run, attempts),
        failures=list(_failures(run, condition, attempts)),
        notes=[*notes, *damage(run)],
        started=min(times, default=None),
        newest=max(changed(run.metrics), changed(run.events), changed(run.verdict)),
        result={key: points[-1][1] for key, points in curves.items() if points},
    )


def _is_cell(run: RunDir) -> bool:
    return find.is_sweep(RunDir(run.path.parents[1], run.path.parent.name))


def _curves(run: RunDir) -> dict[str, Points]:
    """Return every number that was logged, by name; of a step that was repeated, the newest."""
    found: dict[str, dict[int, float]] = {"loss": {}}
    lines: Iterator[LoggedStep | Validation] = iter(
        [*LoggedStep.read(run.path), *Validation.read(run.path)]
    )
    for line in lines:
        if not 0 <= line.step < LAST_STEP:
            continue
        for key, value in line.as_dict().items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and key not in NOT_CURVES and abs(value) < math.inf:
                found.setdefault(key, {})[line.step] = min(max(value, -1e300), 1e300)
    return {
        key: sorted(points.items())
        for key, points in found.items()
        if key == "loss" or any(points.values())
    }


def _marks(events: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    for event in events:
        step, name = event.get("step"), event["event"]
        if name in KINDS and isinstance(step, int) and 0 <= step < LAST_STEP:
            reason = event.get("reason") or event.get("state") or ""
            text = f"{name.replace('_', ' ')} at step {step:,}"
            yield Mark(step, KINDS[name], f"{text}: {reason}" if reason else text)


def _settings(run: RunDir) -> dict[str, tuple[str, str]]:
    values = _configuration(run)
    job = JobRecord.read(run.path)
    command = job.more.get("command") if job is not None else None
    origin: dict[str, str] = {}
    if isinstance(command, list) and "--" in command:
        words = training_words([str(word) for word in command[command.index("--") + 1 :]]) or ()
        folder = next((each.directory for each in Submission.read(run.path)[-1:]), None) or "."
        try:
            origin = origins([str(Path(folder, each)) if is_file(each) else each for each in words])
        except (ConfigError, OSError):
            origin = {}  # the recipe is gone
    default = {name: value for name, _, value, *_ in describe()}
    changed_by = "recipe or command line"
    return {
        key: (
            value,
            origin.get(key, "default" if value == _plain(default.get(key)) else changed_by),
        )
        for key, value in values.items()
    }


def _configuration(run: RunDir) -> dict[str, str]:
    """Return the configuration of a training; empty for other programs."""
    try:
        values = yaml_values.load(run.config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        values = None
    found: dict[str, str] = {}
    for key, value in dotted(values if isinstance(values, dict) else {}).items():
        parts = dotted({key: value}) if isinstance(value, dict) and value else {key: value}
        found |= {name: _plain(each) for name, each in parts.items()}
    return found


def _cell(run: RunDir) -> dict[str, str]:
    """Return the values that a sweep chose for a run, by key."""
    for path in paths_in(run.path.parent / "job", "cells-*.json"):
        for cell in Cell.all_of(path):
            if cell.name == run.name and cell.words[:1] and cell.words[0].startswith("--"):
                names = [word.removeprefix("--") for word in cell.words[::2]]
                return dict(zip(names, cell.words[1::2], strict=False))
            if cell.name == run.name:
                return dict(word.split("=", 1) for word in cell.words if "=" in word)
    return {}


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def _facts(run: RunDir, events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what is known of the code, the environment and the machines."""
    found: dict[str, str] = {}
    source = CodeRecord.read(run.job / "source.json")
    if source is not None:
        commit = source.commit[:12] if source.commit else "not a git checkout"
        found["code"] = f"{commit}{', with changes' if source.modified else ''}"
        found["files of the code"] = f"{len(source.files)}, from {source.root}"
    for submission in Submission.read(run.path)[-1:]:
        found["command"] = " ".join(submission.argv or [])
        found |= submission.versions or {}
    sizes = [event.get("world_size") for event in events if event["event"] == "started"]
    if sizes:
        found["ranks"] = str(sizes[-1])
    for attempt in find.attempts(run)[-1:]:
        found["ranks"] = str(attempt.ranks)
        found["nodes"] = f"{len(attempt.hosts)}: {listed(sorted(set(attempt.hosts)))}"
    return found


def _table(run: RunDir, attempts: Sequence[AttemptRecord]) -> list[list[str]]:
    """Return a table of the attempts: what is new in one, compared to the one before, is there."""
    if not attempts:
        return []
    versions = {each.job: each.versions or {} for each in Submission.read(run.path)}
    restarts = Restart.read(run.path)
    rows = [["attempt", "job", "started", "ranks", "nodes", "ended", "changes"]]
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        changes = []
        if before is not None:
            cause = [each for each in restarts if before.started < each.time <= attempt.started + 1]
            changes += [f"restart: {cause[-1].cause}"] if cause else []
            changes += _changes("hosts", set(before.hosts), set(attempt.hosts))
            if before.ranks != attempt.ranks:
                changes.append(f"{before.ranks} → {attempt.ranks} ranks")
            old, new = (versions.get(each.job, {}) for each in (before, attempt))
            changes += [
                f"{name} {old[name]} → {new[name]}"
                for name in old.keys() & new.keys()
                if old[name] != new[name]
            ]
        hosts = listed(list(dict.fromkeys(attempt.hosts)))
        when, ranks = clock(attempt.started), str(attempt.ranks)
        ended = attempt.state or "no written end"
        number = str(attempt.number)
        rows.append([number, attempt.job, when, ranks, hosts, ended, "; ".join(changes)])
    return rows


def _changes(what: str, old: set[str], new: set[str]) -> list[str]:
    gone, come = sorted(old - new), sorted(new - old)
    return [f"{what}: {', '.join([f'-{a}' for a in gone] + [f'+{a}' for a in come])}"] * (
        old != new
    )


def _failures(
    run: RunDir, condition: Condition, attempts: Sequence[AttemptRecord]
) -> Iterator[Failure]:
    """Yield the cause of each attempt that failed, the newest first, as `rollcall why` says it."""
    plain = Condition(condition.state)  # without its job: Slurm knows only the newest attempt
    newest = attempts[-1] if attempts else None
    for attempt in reversed(attempts):
        is_over = attempt is not newest or not condition.is_live
        if attempt.state not in ("finished", "stopped") and is_over:
            asked = condition if attempt is newest else plain
            cause = root_cause.find_cause(run, asked, attempt)
            yield _failure(f"Attempt {attempt.number}", cause)
    if not attempts and condition.state in ("failed", "lost"):
        yield _failure("The run", root_cause.find_cause(run, condition, None))


def _failure(title: str, cause: RootCause | None) -> Failure:
    known = cause or RootCause("the cause is unknown")
    return Failure(title, known, tail(known.log)[-LINES:] if known.log else [])


def clock(seconds: float) -> str:
    """Return a time for people; empty if it is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def duration(seconds: float) -> str:
    """Return a number of seconds for people, in two units: 3 h 12 min."""
    if not 0 <= seconds < 1e12:
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts: list[str] = []
    left = round(seconds)
    for unit, size in units:
        count, left = divmod(left, size)
        parts += [f"{count} {unit}"] if count or parts else []
    return " ".join(parts[:2])


def title_of(key: str) -> str:
    """Return the name of a curve in words."""
    known = {
        "loss": "Training loss",
        "lr": "Learning rate",
        "grad_norm": "Gradient norm",
        "samples_per_second": "Throughput, samples/s",
        "data_wait": "Share of time spent waiting for data",
    }
    plain = re.sub(r"^val_", "validation ", key).replace("_", " ")
    return known.get(key, plain[:1].upper() + plain[1:])


def figure(value: float) -> str:
    """Return a number for people: four significant digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
