"""Everything that a report says about one run, read from its directory."""

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rollcall.cli.installation import training_words
from rollcall.config import Config, ConfigError, describe, origins, yaml_values
from rollcall.config.arguments import complete
from rollcall.config.read import is_file
from rollcall.launch.commands.why import LINES
from rollcall.launch.runs import find, restarts, root_cause, states
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.runs.goodput import Goodput, goodput
from rollcall.launch.runs.root_cause import RootCause
from rollcall.launch.runs.states import Condition, Progress
from rollcall.messages.text import clock, dotted, figure
from rollcall.records.attempt import AttemptRecord
from rollcall.records.code import CodeRecord
from rollcall.records.job import Cell, JobRecord, Restart, Submission
from rollcall.records.run import INTEGER_LIMIT, LoggedStep, Validation
from rollcall.records.run_dir import RunDir
from rollcall.system.files import listed as paths_in
from rollcall.system.files import read_lines, read_whole, tail
from rollcall.system.hosts import fold

FAULTS = (
    *("failed", "skipped", "rolled_back", "overflowed", "diverged", "out_of_memory"),
    *("save_failed", "save_delayed", "refused", "logger_failed"),
)
KINDS = {
    **{"resumed": "restart", "checkpointed": "checkpoint", "evaluated": "evaluation"},
    **{"signalled": "signal", **dict.fromkeys(FAULTS, "fault")},
}
"""The kind of mark that an event becomes, by its name."""
NOT_CURVES = ("epoch", "slowest_rank", "unreadable", "step", "time")
"""Numbers of a logged step that get no curve."""
TITLES = {
    **{"loss": "Training loss", "lr": "Learning rate", "grad_norm": "Gradient norm"},
    **{"samples_per_second": "Throughput, samples/s", "tokens_per_second": "Throughput, tokens/s"},
    **{"flops_per_second": "Operations of the model, FLOP/s", "mfu": "MFU"},
    "slowest_ratio": "Step time of the slowest rank / that of the others",
    "data_wait": "Share of time spent waiting for data",
}
"""Names of curves in words; of others, the name in the file without underscores."""
PERCENT = ("val_accuracy",)
"""Curves that are drawn in per cent."""
SAMPLES = 6
"""The most images that a report shows."""

Points = list[tuple[int, float]]


class Mark(NamedTuple):
    """Something that happened at a step."""

    step: int
    kind: str  # one of the values of KINDS, or `done again`
    text: str
    since: int = 0  # of steps that were done again: the checkpoint that they were done from


class Failure(NamedTuple):
    """A failed attempt and its cause."""

    title: str
    cause: RootCause
    lines: list[str]  # the end of the log, if there is one


@dataclass(frozen=True)
class Story:
    """The content of a report about one run."""

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
    complaint: str  # what went wrong in asking Slurm
    started: float | None  # seconds since 1970

    @property
    def newest(self) -> dict[str, float]:
        """The last value of each curve; it may be NaN or infinite."""
        return {key: of[-1][1] for key, of in self.curves.items() if of}

    @property
    def result(self) -> dict[str, float]:
        """The last value of each curve that ends with a finite one."""
        return {key: value for key, value in self.newest.items() if math.isfinite(value)}

    # A report shows what follows of a few runs only.

    @cached_property
    def drawn(self) -> dict[str, Points]:
        """The curves with a finite value; an accuracy in per cent, as its title says."""
        known = {key: of for key, of in self.curves.items() if any(math.isfinite(y) for _, y in of)}
        return known | {
            key: [(step, 100 * y) for step, y in known[key]] for key in PERCENT if key in known
        }

    @cached_property
    def times(self) -> dict[int, float]:
        """The seconds from the start of the run to each line of metrics.jsonl, by step."""
        lines: list[LoggedStep | Validation] = [*LoggedStep.read(self.run.path)]
        lines += Validation.read(self.run.path)
        times = {line.step: line.time for line in lines}
        start = min([*times.values(), self.started or math.inf], default=0.0)
        return {step: time - start for step, time in times.items()}

    @cached_property
    def goodput(self) -> Goodput | None:
        """The shares of its wall clock."""
        return goodput(self.run, self.condition)

    @cached_property
    def samples(self) -> dict[int, str]:
        """The newest images that the run has drawn, as base64, by step."""
        images = self.run.read_samples(SAMPLES)
        return {step: base64.b64encode(image).decode() for step, image in images.items()}

    @cached_property
    def failures(self) -> list[Failure]:
        """The failed attempts, the newest first."""
        return list(_failures(self.run, self.condition))

    @cached_property
    def notes(self) -> list[str]:
        """Notes about what is missing."""
        notes = [self.complaint] if self.complaint else []
        if not any(self.curves.values()):
            notes += ["This run has no lines of steps in metrics.jsonl, so it has no curves."]
            notes += ["docs/report.md shows how a program of yours writes them."]
        return notes


def chosen(words: Sequence[str], root: str) -> list[RunDir]:
    """Return the runs of these names, a sweep's cells in its place; raise NoRunError without."""
    runs = []
    for word in words:
        run, *cells = find.with_cells(find.find(word, root).path)
        if find.is_sweep(run) and not cells:
            raise NoRunError(f"the sweep {run.name} has no runs yet; see rollcall status {word}")
        runs += cells or [run]
    return list({run.path: run for run in runs}.values())


def tell(runs: Sequence[RunDir]) -> list[Story]:
    """Read these runs. Whatever their files hold, nothing is raised."""
    conditions, complaint = states.look(runs)
    parents = {run.path.parent for run in runs}
    sweeps = {
        path: _cells(path) for path in parents if find.is_sweep(RunDir(path.parent, path.name))
    }
    stories = []
    for run, condition in zip(runs, conditions, strict=True):
        cells = sweeps.get(run.path.parent)
        sweep = "" if cells is None else run.path.parent.name
        name = f"{sweep}/{run.name}" if sweep and len(parents) > 1 else run.name
        attempts, events = find.attempts(run), run.read_events()
        times = [attempt.started for attempt in attempts] + [event["time"] for event in events[:1]]
        story = Story(
            run=run,
            name=name,
            sweep=sweep,
            condition=condition,
            progress=states.progress(run, condition),
            curves=_curves(run),
            marks=list(_marks(run, events)),
            cell=(cells or {}).get(run.name, {}),
            settings=_settings(run),
            facts=_facts(run, events, attempts),
            attempts=_table(run, attempts, condition.is_live),
            complaint=complaint,
            started=min(times, default=None),
        )
        stories.append(story)
    return stories


def _curves(run: RunDir) -> dict[str, Points]:
    """Return every number that was logged, by name; of a step that was repeated, the newest."""
    values: dict[str, dict[int, float]] = {"loss": {}}
    for line in read_lines(run.metrics):
        known = LoggedStep.parse(line) or Validation.parse(line)
        for key, value in line.items() if known and known.step >= 0 else ():
            if key not in NOT_CURVES and type(value) in (int, float):
                shown = min(max(value, -1e300), 1e300) if abs(value) < math.inf else value
                values.setdefault(key, {})[line["step"]] = shown
    is_curve = {key: key == "loss" or any(points.values()) for key, points in values.items()}
    return {key: sorted(points.items()) for key, points in values.items() if is_curve[key]}


def _marks(run: RunDir, events: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    backs = restarts.rollbacks(run)
    for back in backs:
        text = f"steps {back.step + 1:,} to {back.reached:,} were done again"
        yield Mark(back.reached, "done again", text, back.step)
    resumed = {back.step for back in backs}  # the band says more than a line at its start
    for event in events:
        step, name = event.get("step"), event["event"]
        if name == "resumed" and step in resumed:
            continue
        if name in KINDS and isinstance(step, int) and 0 <= step < INTEGER_LIMIT:
            reason = event.get("reason") or event.get("state") or ""
            text = f"{name.replace('_', ' ')} at step {step:,}"
            yield Mark(step, KINDS[name], f"{text}: {reason}" if reason else text)


def _settings(run: RunDir) -> dict[str, tuple[str, str]]:
    """Return the configuration of a training and its origin; empty for other programs."""
    try:
        read = yaml_values.load(read_whole(run.config).decode())
    except (OSError, ValueError, yaml.YAMLError):
        read = None
    read = read if isinstance(read, dict) else {}
    origin, default = _origins(run), _defaults(read)
    settings = {}
    for key, value in _flat(read).items():
        guess = "default" if value == default.get(key) else "recipe or command line"
        settings[key] = (value, origin.get(key, "default" if origin else guess))
    return settings


def _flat(read: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each value, also of each argument, by its key."""
    values: dict[str, Any] = {}
    for key, value in dotted(read).items():
        values |= dotted({key: value}) or {key: {}}
    return {key: _plain(value) for key, value in values.items()}


def _defaults(read: Mapping[str, Any]) -> dict[str, str]:
    """Return the default of each key, and of the arguments of the code that is named here."""
    known = {name: _plain(value) for name, _, value, *_ in describe()}
    groups = {name: group for name, group in read.items() if isinstance(group, dict)}
    for name, group in groups.items():
        groups[name] = {key: value for key, value in group.items() if not str(key).endswith("args")}
    try:
        return _flat(complete(Config.model_validate(groups)).model_dump()) | known
    except (ConfigError, ValueError):
        return known


def _origins(run: RunDir) -> dict[str, str]:
    """Return the origin of each key's value, as far as the job recorded its words."""
    job = JobRecord.read(run.path)
    command = job.more.get("command") if job is not None else None
    if not isinstance(command, list) or "--" not in command:
        return {}
    words = training_words([str(word) for word in command[command.index("--") + 1 :]]) or ()
    newest = Submission.newest(run.path)
    folder = (newest.directory if newest else None) or "."
    try:
        return origins([str(Path(folder, word)) if is_file(word) else word for word in words])
    except (ConfigError, OSError):
        return {}  # the recipe is gone


def _cells(path: Path) -> dict[str, dict[str, str]]:
    """Return the values that a sweep chose, by key, for each of its runs."""
    cells = {}
    files = paths_in(path / "job", "cells-*.json")
    for cell in (cell for file in files for cell in Cell.all_of(file)):
        words = [word.removeprefix("--") for word in cell.words]
        pairs = [word.partition("=")[::2] for word in words]
        if cell.words[:1] != words[:1]:  # of a script: --key value
            pairs = list(zip(words[::2], words[1::2], strict=False))
        cells[cell.name] = dict(pairs)
    return cells


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _facts(
    run: RunDir, events: Sequence[Mapping[str, Any]], attempts: Sequence[AttemptRecord]
) -> dict[str, str]:
    """Return the known facts about the code, the environment and the machines."""
    facts: dict[str, str] = {}
    source = CodeRecord.read(run.job / "source.json")
    if source is not None:
        commit = source.commit[:12] if source.commit else "not a git checkout"
        facts["code"] = f"{commit}, with changes" if source.modified else commit
        facts["files of the code"] = f"{len(source.files)}, from {source.root}"
    for submission in Submission.read(run.path)[-1:]:
        facts |= {"command": " ".join(submission.argv or []), **(submission.versions or {})}
    for event in events:
        if event["event"] == "started" and "world_size" in event:
            facts["ranks"] = str(event["world_size"])
            facts["device"] = str(event.get("chip") or "")
    for attempt in attempts[-1:]:
        facts["ranks"] = str(attempt.ranks)
        facts["nodes"] = f"{len(attempt.hosts)}: {fold(attempt.hosts)}"
    return facts


def _table(run: RunDir, attempts: Sequence[AttemptRecord], is_live: bool) -> list[list[str]]:
    """Return a table of the attempts, with what differs from the one before in the last column."""
    versions = {restart.job: restart.versions or {} for restart in Submission.read(run.path)}
    known, before = Restart.read(run.path), dict[str, str]()
    rows = [["attempt", "job", "started", "ranks", "nodes", "ended", "changes"]]
    for number, attempt in enumerate(attempts):
        hosts, ranks = fold(attempt.hosts), str(attempt.ranks)
        now = {"nodes": hosts, "ranks": ranks, **versions.get(attempt.job, {})}
        since = attempts[number - 1].started if number else attempt.started
        causes = [str(line) for line in known if since < line.time <= attempt.started + 1]
        changes = [f"restart: {cause}" for cause in causes[-1:]]
        both = now.keys() & before.keys()
        changes += [f"{key} {before[key]} → {now[key]}" for key in both if before[key] != now[key]]
        is_running = is_live and attempt is attempts[-1]
        ended = attempt.state or ("still running" if is_running else "no written end")
        when = clock(attempt.started)
        changed = "; ".join(sorted(changes))
        rows.append([str(attempt.number), attempt.job, when, ranks, hosts, ended, changed])
        before = now
    return rows if attempts else []


def _failures(run: RunDir, condition: Condition) -> Iterator[Failure]:
    """Yield the cause of each attempt that failed, the newest first, as `rollcall why` says it."""
    attempts = find.attempts(run)
    known: list[AttemptRecord | None] = [*reversed(attempts)]
    if not attempts and condition.state in ("failed", "lost"):
        known = [None]
    for number, attempt in enumerate(known):
        if attempt is not None:
            has_ended_well = attempt.state in ("finished", "stopped")
            if has_ended_well or (number == 0 and condition.is_live):
                continue
        # Slurm knows the job of the newest attempt only.
        asked = condition if number == 0 else Condition(condition.state)
        cause = root_cause.find_cause(run, asked, attempt) or RootCause("the cause is unknown")
        title = "The run" if attempt is None else f"Attempt {attempt.number}"
        yield Failure(title, cause, tail(cause.log)[-LINES:] if cause.log else [])


def title_of(key: str) -> str:
    """Return the name of a curve in words."""
    plain = re.sub(r"^val_", "validation ", key).replace("_", " ")
    return TITLES.get(key, plain[:1].upper() + plain[1:])


def axis_of(key: str) -> str:
    """Return the title of a chart of this curve."""
    return f"{title_of(key)}, %" if key in PERCENT else title_of(key)


def value_of(key: str, value: float) -> str:
    """Return the value of a curve for people."""
    return f"{value:.2%}" if key == "val_accuracy" and 0 <= value <= 1 else figure(value)
