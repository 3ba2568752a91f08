"""The launching from Python: `rollcall.submit`, `map`, `run`, `runs`, and what they return."""

import contextlib
import io
import json
import math
import numbers
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rollcall.cli.installation import CALL
from rollcall.config import yaml_values
from rollcall.launch.api import call
from rollcall.launch.commands import cancel, logs, why
from rollcall.launch.runs import find, states
from rollcall.launch.submission import command, layers, start
from rollcall.launch.submission.plan import TakenError, plan
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import dotted
from rollcall.records.run import Line, LoggedStep, Validation
from rollcall.records.run_dir import RunDir, plain
from rollcall.system.files import is_there


class RunError(Exception):
    """A run that ended without a result; the message is what `rollcall why` says."""


class Job:
    """A run that was submitted, or any other by its name or directory: `Job("mine")`."""

    def __init__(self, run: str | Path | RunDir, root: str = "runs") -> None:
        """Find the run under root, or in this directory; raise RefusedError if it is not there."""
        self.run = run if isinstance(run, RunDir) else find.find(str(run), root)
        self._array = RunDir(self.run.path.parents[1], self.run.path.parent.name)
        self._before = 0  # its attempts before it was submitted

    def __repr__(self) -> str:
        return f"<rollcall.Job {self.run.path}: {self.state}>"

    @property
    def id(self) -> str | None:
        """The id of its newest job: Slurm's, or a process on this machine; None in debug mode."""
        known = find.jobs(self.run) or find.jobs(self._array)
        return known[-1].id if known else None

    @property
    def state(self) -> str:
        """Its state: pending, running, done, stopped, requeue, failed, lost or unknown."""
        return self._look()[0].state

    @property
    def config(self) -> dict[str, Any]:
        """The values of a training by key, such as `optim.lr`; empty for a function or a script."""
        return dotted(yaml_values.read(self.run.config)) if is_there(self.run.config) else {}

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The logged steps of a training as lists of one length: step, loss, lr, time, ..."""
        return _table(LoggedStep.read(self.run.path))

    @property
    def validations(self) -> dict[str, list[Any]]:
        """The evaluations of a training as lists of one length: step, val_loss, time, ..."""
        return _table(Validation.read(self.run.path))

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it is over; return its state, or raise TimeoutError after these seconds."""
        timeout = math.inf if timeout is None else timeout
        if not isinstance(timeout, numbers.Real) or math.isnan(timeout):
            raise RefusedError(f"wait: expected seconds, such as 60, got {timeout!r}")
        start = time.monotonic()
        while not (look := self._look())[1]:
            if (waited := time.monotonic() - start) >= timeout:
                raise TimeoutError(f"run {self.run.name} is {look[0].state} after {timeout} s")
            time.sleep(min(_pause(waited), timeout - waited))
        return look[0].state

    def __await__(self) -> Generator[Any, Any, Any]:
        """Wait, while other tasks run, and return what `result` does."""
        import asyncio  # here: few programs need it

        start = time.monotonic()
        while not (yield from asyncio.to_thread(self._look).__await__())[1]:
            yield from asyncio.sleep(_pause(time.monotonic() - start)).__await__()
        return self.result()

    def result(self, timeout: float = math.inf) -> Any:
        """Wait; return rank 0's result (None for a script), or raise what `exception` returns."""
        if error := self.exception(timeout):
            raise error
        path = self.run.job / call.RESULT
        return call.load(path) if path.exists() else None

    def exception(self, timeout: float = math.inf) -> RunError | None:
        """Wait; return the first cause of a failure, or that it was stopped; None if it is done."""
        if (state := self.wait(timeout)) == "done":
            return None
        text = f"run {self.run.name} has no result: it is {state}"  # its task has not begun
        with contextlib.suppress(find.NoRunError):
            text = _printed(why.main, str(self.run.path)).rstrip()
        return RunError(text)

    def logs(self, rank: int = 0, attempt: int | None = None, merge: bool = False) -> str:
        """Return the output of a rank in the newest or another attempt, or of all ranks merged."""
        chosen = {"rank": None if merge else rank, "merge": merge, "attempt": attempt}
        return _printed(logs.main, *_words(chosen), str(self.run.path))

    def cancel(self) -> None:
        """End it, as `rollcall cancel` does; raise RefusedError if it is over."""
        _printed(cancel.main, str(self.run.path))

    def _look(self) -> tuple[states.Condition, bool]:
        """Return its condition, and True if it is over and Slurm has answered."""
        has_begun = len(find.attempts(self.run)) > self._before
        (condition,), complaint = states.look([self.run])
        is_task = is_there(self._array.job / call.FUNCTION)
        if is_task and not has_begun and condition.state != "done":
            (condition,), complaint = states.look([self._array])
            others = "stopped" if condition.state == "stopped" else "lost"
            condition = replace(condition, state="pending" if condition.is_live else others)
        is_live = condition.is_live or (complaint and condition.state != "done")
        return condition, not is_live


def submit(
    target: Callable[..., Any] | str | Path, *args: Any, debug: bool = False, **options: Any
) -> Job:
    """Start a run on Slurm or on this machine; raise RefusedError if it cannot start.

    Args:
        target: a function, which every rank calls; a script such as `train.py`; or a recipe.
        args: its arguments; of a script or a recipe, words of the command line.
        debug: call the function now and in this process, as the only rank.
        options: as for `rollcall submit`, such as `nodes=2, gpus_per_node=8, time="2:00:00"`.
    """
    if not isinstance(target, str | Path):
        return _start(options, [], target, [args], debug)[0]
    if debug:
        raise RefusedError("debug=True: only a function can be called in this process")
    if any(isinstance(word, Mapping) for word in args):
        raise RefusedError("a dictionary: write each key as a word, such as 'optim.lr=0.1'")
    words = [str(word) for word in (target, *args)]
    is_program = words[0] == "-m" or words[0].endswith(".py")
    return _start(options, ["--", *words] if is_program else words)[0]


def map(
    function: Callable[..., Any], *iterables: Iterable[Any], throttle: int = 0, **options: Any
) -> list[Job]:
    """Start a run for each item of the iterables, all as one array; return them in order.

    Every rank of a run calls the function with an item of each iterable. At most `throttle` runs
    run at the same time (0: all that fit). The options are as for `submit`.
    """
    try:
        iterators = [iter(items) for items in iterables]
    except TypeError as error:
        raise RefusedError(f"map: expected a function and lists of one length; {error}") from None
    if not iterators:
        raise RefusedError("map: expected a function and lists of one length, got no list")
    try:
        calls = list(zip(*iterators, strict=True))
    except ValueError as error:
        if not str(error).startswith("zip()"):  # it is of the user's generator
            raise
        text = str(error).replace("zip() ", "").replace("argument", "list")
        raise RefusedError(f"map: expected a function and lists of one length; {text}") from None
    if options.get("debug") or not calls:
        return [submit(function, *arguments, **options) for arguments in calls]
    limit = f"%{throttle}" if throttle else ""
    return _start(options, [f"--array=0-{len(calls) - 1}{limit}"], function, calls)


def run(function: Callable[..., Any], *args: Any, ranks: int | None = None, **options: Any) -> Any:
    """Call a function on ranks of this machine, show their output, and return rank 0's result.

    Raise RunError if it fails, or is stopped by Ctrl-C. The options are as for `submit`.
    """
    if ranks is not None and (not str(ranks).isdecimal() or int(ranks) < 1):
        raise RefusedError(f"ranks: expected a number of ranks such as 4, got {ranks!r}")
    here: dict[str, Any] = {"local": True, "wait": True, "nproc_per_node": ranks}
    return submit(function, *args, **here, **options).result()


def runs(root: str = "runs") -> list[Job]:
    """Return all runs under root; the one that changed last comes last."""
    return [Job(run) for run in find.find_all(root) if not find.is_sweep(run)]


def _start(
    options: Mapping[str, Any],
    words: Sequence[str],
    function: Callable[..., Any] | None = None,
    *more: Any,
) -> list[Job]:
    """Start runs; a refusal speaks of keywords, and hides where it comes from."""
    advice = (
        "give a function its arguments by position (" if function else r"add the argument '\1' ("
    )
    try:
        return _begin(options, words, function, *more)
    except RefusedError as error:
        text = str(error).replace(" (--help lists the options)", "")
        text = re.sub(r"(?<=sbatch; )write ([a-z_.]+=\S+) \(", advice, text)
        ways = r"an argument of a script is a word, '\1', and one of a function has a position"
        text = re.sub(r"pass an option of a plugin on with --sbatch-arg=(\S+)", ways, text)
        words = re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), text)
        raise type(error)(words) from None


def _begin(
    options: Mapping[str, Any],
    words: Sequence[str],
    function: Callable[..., Any] | None = None,
    calls: Sequence[tuple[Any, ...]] = (),
    debug: bool = False,
) -> list[Job]:
    if typed := options.keys() & {"array", "doctor", "dry_run", "host"}:
        only = "only the command line `rollcall submit` has this option; remove it"
        raise RefusedError(f"{min(typed)}: {only}")
    if (function is not None or calls) and not callable(function):
        kind = type(function).__name__
        raise RefusedError(f"expected a function, a script (train.py) or a recipe, got a {kind}")
    given = [*_words(options), *words]
    line, setup = layers.read(given, "keywords")
    local, name, root = command.is_local(line), line.own.name, line.own.root or "runs"
    packed = call.pack((function, calls)) if function else b""
    while True:
        argv = given
        if packed:
            stem = f"{plain(getattr(function, '__name__', 'run'))}-{time.strftime('%Y%m%d-%H%M%S')}"
            run = RunDir(root, name) if name else RunDir.unused(root, stem)
            needed = ("cloudpickle", *call.modules(packed))
            line = line._replace(program=(*CALL, str(run.job / call.FUNCTION), *needed))
            line.own.name = run.name
            argv = [*given, f"--name={run.name}", "--", *line.program]
        files = {call.FUNCTION: packed} if packed else {}
        planned = replace(plan(line, argv, setup), files=files)
        if packed and not (planned.is_new or planned.resume):
            raise RefusedError(
                f"run {run.name} exists: rollcall.Job('{run.path}').result() has its result; to "
                "call the function in it again, add resume=True; or choose another name"
            )
        tasks = [RunDir(planned.run.path, f"task-{number}") for number in range(len(calls))]
        jobs = [Job(run) for run in (tasks if "array" in line.passed else [planned.run])]
        for job in jobs:
            job._before = len(find.attempts(job.run))
        with contextlib.suppress(TakenError), _as_command(planned.wait or debug):
            if function and debug:
                call.here(planned.run, function, calls[0])
            else:
                start.start(planned, local)
            return jobs


@contextlib.contextmanager
def _as_command(shows: bool) -> Iterator[None]:
    """Restore the environment, which a submission sets for its job, and hide what it prints."""
    before = dict(os.environ)
    try:
        with contextlib.redirect_stdout(sys.stdout if shows else io.StringIO()):
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _pause(waited: float) -> float:
    return min(max(waited / 10, 0.2), 10.0)


def _printed(command: Callable[[Sequence[str]], int], *words: str) -> str:
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
    with contextlib.redirect_stdout(output):
        command(words)
    output.seek(0)
    return output.read()


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line: `nodes=2` becomes `--nodes=2`."""
    texts = yaml_values.load(json.dumps(options, default=str, ensure_ascii=False), as_text=True)
    return layers.as_words({name.replace("_", "-"): text for name, text in texts.items()})


def _table(lines: Sequence[Line]) -> dict[str, list[Any]]:
    """Return a list for each figure of the lines, with None where a line has none."""
    rows = [line.as_dict() for line in lines]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
