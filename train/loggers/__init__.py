"""Loggers and callbacks that a configuration names: members of the training step.

Each is an object with some of these methods:

- `logged(step, values)`: the values of a line of metrics.jsonl, on rank 0 only;
- `report()` and `settle(step, agreed)`: as in a member of the step (`dist/agreement.py`);
- `close()`: the run ends, or this attempt.

What a callback raises ends the run. A logger that fails is reported once, and the run goes on.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch import nn

from rollcall.config import ConfigError, arguments
from rollcall.records.files import read_lines
from rollcall.records.run import ForgottenStep, LoggedStep
from rollcall.train.dist import failure
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.run import Run

METHODS = ("logged", "report", "settle", "close")


class Once:
    """Leaves out what was logged before, by an earlier attempt or before a rollback."""

    def __init__(self, last: Callable[[str], int]) -> None:
        """Ask for the last step that earlier attempts have logged of a name, or -1."""
        self._ask = last
        self._last: dict[str, int] = {}

    def new(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values whose names have none of this step or of a later one."""
        self._last |= {name: self._ask(name) for name in values if name not in self._last}
        found = {name: one for name, one in values.items() if step > self._last[name]}
        self._last.update(dict.fromkeys(found, step))
        return found


def last_in_metrics(run: Run) -> Callable[[str], int]:
    """Return the last step of a name in metrics.jsonl, and of those that were forgotten there."""
    last: dict[str, int] = {}
    for file in (ForgottenStep.FILE, LoggedStep.FILE):
        for line in read_lines(run.run_dir.path / file):
            last |= {name: max(last.get(name, 0), line.get("step", 0)) for name in line}
    return lambda name: last.get(name, -1)


def numbers_of(line: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a line of metrics.jsonl that loggers receive."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }


class Callbacks:
    """The member of the step that passes everything on to the user's, in their order."""

    def __init__(self, run: Run, model: Callable[[], nn.Module]) -> None:
        self._run = run
        self._model = model  # known once it is spread
        self._members: dict[str, Any] = {}  # by key
        self._failed: set[str] = set()  # keys of loggers

    def open(self) -> None:
        """Make loggers on rank 0 and callbacks on all ranks, once the run directory exists.

        Raise ConfigError on every rank if one cannot be made, or has none of the methods.
        """
        config, problem = self._run.config, ""
        loggers = config.log.to if self._run.world.is_main else {}
        for section, entries in (("log.to", loggers), ("train.callbacks", config.train.callbacks)):
            for name, entry in entries.items():
                key = f"{section}.{name}"
                try:
                    self._members[key] = self._made(section, key, entry)
                except ConfigError as error:
                    problem = problem or str(error)
        self._run.world.raise_together(problem)

    @property
    def wants_every_step(self) -> bool:
        """Whether one of them is a member of the step: short steps must not be reported as one."""
        members = self._members.values()
        return any(hasattr(one, "report") or hasattr(one, "settle") for one in members)

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the values of a line of metrics.jsonl; rank 0 calls it."""
        self._each("logged", step, numbers_of(values))

    def report(self) -> Mapping[str, float | torch.Tensor]:
        """Return all their numbers."""
        found: dict[str, float | torch.Tensor] = {}
        for key, numbers in self._each("report"):
            values = numbers.values() if isinstance(numbers, Mapping) else [None]
            if not all(isinstance(value, Real | torch.Tensor) for value in values):
                raise ConfigError(f"{key}: expected report() to return numbers by name: {numbers}")
            found.update(numbers)
        return found

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Let them act on the sums; return the strongest action."""
        strongest = Action.CONTINUE
        for key, action in self._each("settle", step, agreed):
            if not isinstance(action, Action | None):
                raise ConfigError(f"{key}: expected settle() to return an Action, got {action!r}")
            strongest = max(strongest, action or Action.CONTINUE)
        return strongest

    def close(self) -> None:
        """Let them finish, each also if another cannot."""
        with ExitStack() as stack:
            for key, member in reversed(self._members.items()):
                if hasattr(member, "close"):
                    stack.callback(self._call, key, member.close)

    def _made(self, section: str, key: str, entry: Any) -> Any:
        given = {"run": self._run, "model": self._model()}
        try:
            made = arguments.call(section, f"{key}.args", entry.name, entry.args, **given)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{key}={entry.name} needs the package {error.name}: install it with pip"
            ) from error
        if not any(hasattr(made, method) for method in METHODS):
            raise ConfigError(
                f"{key}={entry.name}: expected an object with one of the methods "
                f"{', '.join(METHODS)}, got a {type(made).__name__}"
            )
        if section == "log.to" and (hasattr(made, "report") or hasattr(made, "settle")):
            raise ConfigError(
                f"{key}={entry.name}: a logger is on rank 0 alone, so it can have neither report() "
                "nor settle(); use train.callbacks"
            )
        return made

    def _each(self, method: str, *what: Any) -> list[tuple[str, Any]]:
        return [
            (key, self._call(key, getattr(member, method), *what))
            for key, member in self._members.items()
            if hasattr(member, method)
        ]

    def _call(self, key: str, function: Callable[..., Any], *what: Any) -> Any:
        try:
            return function(*what)
        except Exception as error:  # a server that does not answer, or a full disk
            if not key.startswith("log.to."):
                raise
            if key not in self._failed:
                self._failed.add(key)
                text = f"{key} failed: {failure.describe(error)}".splitlines()[0]
                text += "; the run continues, and metrics.jsonl has every line"
                self._run.tell("logger_failed", text, logger=key)
