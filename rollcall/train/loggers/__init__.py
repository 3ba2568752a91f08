"""Loggers and callbacks that a configuration names: members of the training step.

Each is an object with some of these methods:

- `logged(step, values)`: the values of a line of metrics.jsonl, on rank 0 only;
- `report()` and `settle(step, agreed)`: as in a member of the step (`ranks/agreement.py`), except
  that `report` must return a mapping, and that `settle` may return nothing;
- `close()`: the run ends, or this attempt.

What a callback raises ends the run. A logger that fails is reported once, and the run goes on.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch import nn

from rollcall.config import ConfigError, arguments, plugin
from rollcall.records.run import ForgottenStep, LoggedStep
from rollcall.system.files import read_lines
from rollcall.train.ranks import failure
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.run import Run

METHODS = ("logged", "report", "settle", "close")


class Once:
    """Leaves out what was logged before, by an earlier attempt or before a rollback."""

    def __init__(self, run: Run) -> None:
        """Learn the last step of each name in metrics.jsonl, and of those forgotten there."""
        self._last: dict[str, int] = {}
        for file in (ForgottenStep.FILE, LoggedStep.FILE):
            for line in read_lines(run.run_dir.path / file):
                step = line.get("step", 0)
                self._last |= {name: max(self._last.get(name, 0), step) for name in line}

    def new(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values whose names have none of this step or of a later one."""
        new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        self._last.update(dict.fromkeys(new, step))
        return new


def _is_member(callback: Any) -> bool:
    return hasattr(callback, "report") or hasattr(callback, "settle")


class Callbacks:
    """The member of the step that passes everything on to the user's, in their order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._model: nn.Module
        self._reported: dict[str, set[str]] = {}  # names, by key
        self._members: dict[str, Any] = {}  # by key
        self._failed: set[str] = set()  # keys of loggers

    def open(self, model: nn.Module) -> dict[str, Any]:
        """Make loggers on rank 0 and callbacks on all ranks; return the callbacks by key."""
        self._model, config, world = model, self._run.config, self._run.world
        loggers = config.log.to if world.is_main else {}
        with world.together():
            for name, entry in loggers.items():
                self._make("log.to", name, entry)
            for name, entry in config.train.callbacks.items():
                self._make("train.callbacks", name, entry)
        members = self._members.items()
        return {key: member for key, member in members if not key.startswith("log.to.")}

    @property
    def wants_every_step(self) -> bool:
        """True for a member of the step among them: short steps must not be reported as one."""
        return any(map(_is_member, self._members.values()))

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the numbers of a line of metrics.jsonl; rank 0 calls it."""
        names = [name for name, value in values.items() if isinstance(value, int | float)]
        self._call_all("logged", step, {n: values[n] for n in names if n not in ("step", "time")})

    def report(self) -> Mapping[tuple[str, str], Any]:
        """Return all their numbers, by key and name."""
        reported: dict[tuple[str, str], Any] = {}
        for key, numbers in self._call_all("report"):
            values = numbers.values() if isinstance(numbers, Mapping) else [None]
            if not all(isinstance(value, Real | torch.Tensor) for value in values):
                raise ConfigError(f"{key}: expected report() to return numbers by name: {numbers}")
            if self._reported.setdefault(key, {*numbers}) != {*numbers}:
                changed = ", ".join(sorted(self._reported[key] ^ {*numbers}))
                advice = "return the same names in every step"
                raise ConfigError(f"{key}: report() returns {changed} only in some steps; {advice}")
            reported |= {(key, name): value for name, value in numbers.items()}
        return reported

    def settle(self, step: Step, agreed: Mapping[tuple[str, str], Any]) -> Action:
        """Let each act on the sums of its own numbers; return the strongest action."""
        strongest = Action.CONTINUE
        for key, member in self._members.items():
            if not hasattr(member, "settle"):
                continue
            numbers = {name: value for (owner, name), value in agreed.items() if owner == key}
            action = self._call(key, member.settle, step, numbers)
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

    def _make(self, section: str, name: str, entry: Any) -> None:
        key = f"{section}.{name}"
        given = {"run": self._run, "model": self._model}
        try:
            made = arguments.call(section, f"{key}.args", entry.name, entry.args, **given)
        except ModuleNotFoundError as error:
            raise ConfigError(plugin.needs(f"{key}={entry.name}", str(error.name))) from error
        if not any(hasattr(made, method) for method in METHODS):
            raise ConfigError(
                f"{key}={entry.name}: expected an object with one of the methods "
                f"{', '.join(METHODS)}, got a {type(made).__name__}"
            )
        if section == "log.to" and _is_member(made):
            raise ConfigError(
                f"{key}={entry.name}: a logger is on rank 0 alone, so it can have neither report() "
                "nor settle(); use train.callbacks"
            )
        self._members[key] = made

    def _call_all(self, method: str, *what: Any) -> list[tuple[str, Any]]:
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
