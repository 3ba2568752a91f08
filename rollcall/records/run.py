"""The files of a run directory that training and launching share. No torch.

Each file has one owner, a class here or in job.py and attempt.py: it alone knows the name and keys.
A record is either a line of a file that only grows (`Line`) or a whole file that is replaced
atomically (`Whole`). Names are relative to the run directory unless the class says otherwise.

Readers leave out what is cut off, misses a key or has a value of the wrong type; unknown keys are
ignored.
"""

import contextlib
import functools
import json
import math
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Self, TypeAlias, get_args

from rollcall.system import files

Check: TypeAlias = Callable[[object], bool]
State: TypeAlias = Literal["done", "requeue", "failed", "stopped"]
CLAIM = "claim-{}"
"""The file with a random word of an attempt, of which the newest may write; see `RunDir.claim`."""
INTEGER_LIMIT = 2**63
"""Integers from this one on count as damage."""
EVENTS = "events.jsonl"
"""Events: an object per line with `time`, `event` and fields that depend on the event."""


@dataclass(frozen=True)
class Record:
    """A JSON object with a dataclass's fields; `more` has other keys, None is not written."""

    FILE: ClassVar[str]

    @classmethod
    def parse(cls, value: object) -> Self | None:
        """Make a record of a JSON value; None if a field is missing or has the wrong type."""
        if not isinstance(value, dict):
            return None
        known: dict[str, Any] = {}
        checks = _checks(cls)  # type: ignore[arg-type] # mypy does not see that it is hashable
        for name, (fits, is_needed) in checks.items():
            if name in value:
                if not fits(value[name]):
                    return None
                known[name] = value[name]
            elif is_needed:
                return None
        if "more" in cls.__dataclass_fields__:
            known["more"] = {key: value[key] for key in value if key not in checks}
        return cls(**known)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        values = {**vars(self)}
        values = {**values.pop("more", {}), **values}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Line(Record):
    """A record that is one line of a file."""

    def append(self, directory: Path) -> None:
        """Append the record to its file."""
        files.append_line(directory / self.FILE, self.as_dict())

    @classmethod
    def open(cls, directory: Path) -> BinaryIO:
        """Open the file for a writer that keeps it open; see `write_to`."""
        return files.open_lines(directory / cls.FILE)

    def write_to(self, file: BinaryIO) -> None:
        """Append the record to the open file."""
        files.write_line(file, self.as_dict())

    @classmethod
    def read(cls, directory: Path) -> list[Self]:
        """Read all records that can be read; none if the file is missing."""
        records = (cls.parse(line) for line in files.read_lines(directory / cls.FILE))
        return [record for record in records if record is not None]

    @classmethod
    def last(cls, directory: Path) -> list[Self]:
        """Return the records of the last lines, in order, without reading the whole file."""
        records = (cls.parse(files.as_object(line)) for line in files.tail(directory / cls.FILE))
        return [record for record in records if record is not None]

    @classmethod
    def newest(cls, directory: Path) -> Self | None:
        """Return the last record, without reading the whole file; None without records."""
        return next(iter(cls.last(directory)[-1:]), None)


@dataclass(frozen=True)
class Whole(Record):
    """A record that fills a file; `{name}` in the file's name is replaced by a field or a key."""

    @classmethod
    def path_in(cls, directory: Path, **keys: object) -> Path:
        """Return the path of the file; `keys` fill in its name."""
        return directory / cls.FILE.format_map(keys)

    def write(self, directory: Path, **keys: object) -> None:
        """Write the file atomically; `keys` are parts of its name that no field has."""
        path = self.path_in(directory, **{**vars(self), **keys})
        files.write_atomic(path, json.dumps(self.as_dict()) + "\n")

    def write_once(self, directory: Path, **keys: object) -> None:
        """Write the file unless it exists already: the first writer wins."""
        path = self.path_in(directory, **{**vars(self), **keys})
        files.write_once(path, json.dumps(self.as_dict()) + "\n")

    @classmethod
    def read(cls, directory: Path, **keys: object) -> Self | None:
        """Read the file; None if it is missing or cannot be read."""
        return cls.parse(files.read_object(cls.path_in(directory, **keys)))

    @classmethod
    def read_all(cls, directory: Path, **keys: object) -> dict[Path, Self]:
        """Read every file of this kind whose name has these keys, in the order of their names."""
        pattern = cls.FILE.format_map(defaultdict(lambda: "*", keys))
        paths = files.listed(directory, pattern)
        records = {path: cls.parse(files.read_object(path)) for path in paths}
        return {path: record for path, record in records.items() if record is not None}


@dataclass(frozen=True)
class Verdict(Whole):
    """How an attempt ended; `state` tells a launcher or a person what to do next.

    `done`: nothing is left to do. `requeue`: the scheduler asked the run to stop; start it again.
    `stopped`: a person asked it to stop. `failed`: see `reason`.
    """

    FILE = "verdict.json"

    state: State
    step: int
    reason: str


@dataclass(frozen=True)
class JobEnd(Whole):
    """The end of the job, in seconds since 1970; the file is missing if the end is unknown."""

    FILE = "job/deadline.json"

    end: float


@dataclass(frozen=True)
class LoggedStep(Line):
    """A step that rank 0 logged."""

    FILE = "metrics.jsonl"

    step: int  # updates done, this one included
    loss: float  # mean over the samples of the step
    samples_per_second: float  # since the line before
    time: float  # seconds since 1970
    data_wait: float = 0.0  # fraction of the time that was spent waiting for data
    more: dict[str, Any] = field(default_factory=dict)  # such as the learning rate

    @classmethod
    def span(cls, directory: Path, since: float) -> tuple[Self, Self] | None:
        """Return the first of the last steps since a time, and the newest; None without steps."""
        steps = cls.last(directory)
        recent = [step for step in steps if step.time >= since] or steps[-1:]
        return (recent[0], steps[-1]) if steps else None

    @classmethod
    def forget_after(cls, directory: Path, step: int) -> None:
        """Move the lines of steps that a resumed run repeats, validations included.

        They go to the file of `ForgottenStep`, if it can be written. After an OSError, this file is
        unchanged.
        """
        cls._keep(directory, lambda line: line["step"] <= step)

    @classmethod
    def forget_validation(cls, directory: Path, step: int) -> None:
        """Drop the validation of a step, which is repeated; raise OSError like `forget_after`."""
        cls._keep(directory, lambda line: line["step"] != step or Validation.parse(line) is None)

    @classmethod
    def _keep(cls, directory: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other lines. Lines that cannot be read are kept in `metrics.jsonl.damaged`."""
        path = directory / cls.FILE
        if path.is_dir():
            files.set_aside(path)
        if not path.exists():
            return
        lines = [*files.parse_lines(files.read_whole(path, files.MOST).splitlines(True))]
        known = [line for line in lines if line and (cls.parse(line) or Validation.parse(line))]
        if len(known) < len(lines):
            files.set_aside(path)
        if dropped := [line for line in known if not is_kept(line)]:
            forgotten = directory / ForgottenStep.FILE
            # An earlier attempt may have crashed between this and the cut below.
            before = {json.dumps(line) for line in files.read_lines(forgotten)}
            with contextlib.suppress(OSError), files.open_lines(forgotten) as file:
                for line in dropped:
                    if json.dumps(line) not in before:
                        files.write_line(file, line)
        text = "".join(json.dumps(line) + "\n" for line in known if is_kept(line))
        files.write_atomic(path, text)


@dataclass(frozen=True)
class ForgottenStep(LoggedStep):
    """A step that was logged, and was then done again after a restart or a rollback."""

    FILE = "forgotten.jsonl"


@dataclass(frozen=True)
class Validation(Line):
    """An evaluation of the model on the validation data, which rank 0 logged."""

    FILE = LoggedStep.FILE

    step: int  # updates done
    val_loss: float  # mean over the validation data
    time: float  # seconds since 1970
    val_accuracy: float | None = None
    more: dict[str, Any] = field(default_factory=dict)  # further figures, named val_…


def read_events(directory: Path, *names: str) -> list[dict[str, Any]]:
    """Read the events with these names, or all, in order; `time` is in seconds since 1970."""
    return [line for line in _events(directory) if not names or line["event"] in names]


def noticed(directory: Path) -> list[str]:
    """Return the newest attempt's remarks about its ranks, in order."""
    texts: list[str] = []
    for line in _events(directory, (b'"started"', b'"straggler"')):
        if line["event"] == "started":
            texts.clear()
        elif isinstance(line.get("text"), str):
            texts.append(line["text"])
    return texts


def start_and_steps(directory: Path) -> tuple[float, int, int | None, dict[str, float]]:
    """Read the start of the newest attempt, in seconds since 1970 (0 if there is none).

    Return also its first step once it is done (else 0), the number of steps it must do, and the
    figures of the newest evaluation by name.
    """
    started, first, steps, evaluated = 0.0, 0, None, dict[str, Any]()
    # Other events, which are most of them, need not be parsed.
    for line in _events(directory, (b'"started"', b'"first_step"', b'"evaluated"')):
        if line["event"] == "started":
            started, first = line["time"], 0
        if line["event"] == "first_step" and _check(int)(line.get("steps")):
            steps = line["steps"]
            first = line["step"] if _check(int)(line.get("step")) else 0
        evaluated = line if line["event"] == "evaluated" else evaluated
    figures = {name: value for name, value in evaluated.items() if isinstance(value, float)}
    figures = {name: figures[name] for name in figures if name not in ("time", "seconds")}
    return started, first, steps, figures


def _events(directory: Path, having: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    for line in files.read_lines(directory / EVENTS, having):
        if isinstance(line.get("event"), str) and _is_time(line.get("time")):
            yield line


@functools.cache
def _checks(kind: type[Record]) -> dict[str, tuple[Check, bool]]:
    """Return the check of each field but `more`, and True if the field must be present."""
    hints = typing.get_type_hints(kind)
    checks = {}
    for entry in fields(kind):
        name, is_needed = entry.name, entry.default is MISSING and entry.default_factory is MISSING
        if name != "more":
            checks[name] = (_is_time if name == "time" else _check(hints[name]), is_needed)
    return checks


def _is_time(value: Any) -> bool:
    return _check(float)(value) and abs(value) < math.inf


@functools.cache
def _check(hint: Any) -> Check:
    """Return a function that checks the type of a JSON value."""
    kind, parts = typing.get_origin(hint), get_args(hint)
    if kind in (typing.Union, types.UnionType):
        checks = [_check(part) for part in parts]
        return lambda value: any(check(value) for check in checks)
    if hint is Any:
        return lambda _: True
    if kind is Literal:
        return lambda value: value in parts
    if kind is list:
        of_item = _check(parts[0])
        return lambda value: isinstance(value, list) and all(map(of_item, value))
    if kind is dict:
        of_value = _check(parts[1])
        return lambda value: isinstance(value, dict) and all(map(of_value, value.values()))
    if hint is int:
        # Python's integers have no limit; an integer too large for a float would stop every reader.
        return lambda value: type(value) is int and abs(value) < INTEGER_LIMIT
    if hint is float:
        return lambda value: type(value) is float or _check(int)(value)
    return lambda value: isinstance(value, hint)
