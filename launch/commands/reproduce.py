"""`rollcall reproduce RUN`: submit the same code, program and options under a new name.

Everything comes from the run directory, which may have been moved. The new run uses the current
Python, and it does not depend on other jobs.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcall.config import parse
from rollcall.launch.runs import find
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job, render
from rollcall.launch.submission import snapshot
from rollcall.launch.submission.command import carry_out
from rollcall.launch.submission.submission import Submission, batch_command
from rollcall.records.job import JobRecord
from rollcall.records.job import Submission as SubmissionRecord
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir
from rollcall.text import word


def main(argv: Sequence[str]) -> int:
    """Submit a run again; return the exit code."""
    parser = find.parser("reproduce", __doc__)
    parser.add_argument("--name", help="name of the new run (default: RUN-again)")
    on_this = "run on this machine, even if it has Slurm"
    parser.add_argument("--local", action="store_true", help=on_this)
    parser.add_argument("--dry-run", action="store_true", help="print the script; write nothing")
    parser.add_argument("--wait", action="store_true", help="show the output until the run ends")
    options = parser.parse_args(argv)
    old = find.find(options.run, options.root)
    run = _new_run(old, options.name)
    submission = _plan(old, run, _submit_words(old, run, options.local))
    local = options.local or not slurm.is_available()
    return carry_out(replace(submission, wait=options.wait), local, options.dry_run)


def _submit_words(old: RunDir, run: RunDir, local: bool) -> list[str]:
    """Return the words after `rollcall submit` that continue the new run, for `requeue`."""
    newest = SubmissionRecord.newest(old.path)
    words = (newest and newest.argv) or []
    end = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:end] if word not in ("--local", "--wait")]
    return [*own, *["--local"] * local, f"--name={run.name}", *words[end:]]


def _new_run(old: RunDir, name: str | None) -> RunDir:
    if name is None:
        return RunDir.unused(old.path.parent, f"{old.name}-again")
    parse([word("run.name", name)])  # refuses an invalid name
    run = RunDir(old.path.parent, name)
    if run.path.exists():
        raise RefusedError(f"--name {name}: {run.path} exists; choose a new name")
    return run


def _plan(old: RunDir, run: RunDir, argv: Sequence[str]) -> Submission:
    record = JobRecord.read(old.path)
    place = JobRecord.place(old.path)
    if record is None and old.config.is_file():
        raise RefusedError(
            f"run {old.name} was not started by `rollcall submit`, so its code was not copied; to "
            f"train with its configuration: rollcall train {old.config} run.name=NEW"
        )
    try:
        if record is None:
            raise KeyError(str(place))
        recorded = record.as_dict()
        code = snapshot.recorded(old.code, old.job / "source")
        copy = old.launcher
        launcher = snapshot.recorded(copy, copy) if copy.is_dir() else None
        copies = itertools.takewhile(Path.is_dir, map(old.modules, itertools.count()))
        modules = tuple(snapshot.recorded(copy, copy) for copy in copies)
    except KeyError as error:
        why = f"{error.args[0]} is missing or damaged; only `rollcall submit` writes it"
        raise RefusedError(f"run {old.name} cannot be reproduced: {why}") from None
    try:
        job, recipes = _job(old, run, recorded)
        render(job)
    except (KeyError, TypeError, AttributeError, ValueError, RefusedError):
        raise RefusedError(f"run {old.name} cannot be reproduced: {place} is damaged") from None
    return Submission(tuple(argv), run, recipes, code, launcher, job, modules=modules)


def _job(old: RunDir, run: RunDir, recorded: dict[str, Any]) -> tuple[Job, tuple[Path, ...]]:
    """Return the recorded job as one of the new run, and the recipes that it needs."""
    before = recorded.pop("run_directory")  # the run may have been moved since

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(moved, value))
        if not isinstance(value, str):
            return value
        option, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
        if path == before or path.startswith(f"{before}/"):
            return f"{option}{equals}{run.path}{path[len(before) :]}"
        return value

    at_job = f"{before}/job/"
    words = [text for text in recorded["command"] if text.startswith(at_job)]
    recipes = tuple(old.path / text[len(before) + 1 :] for text in words)
    recorded["options"].pop("dependency", None)
    fields = {name: moved(value) for name, value in recorded.items()}
    teardown = [word for word in fields["batch"] if word.startswith("--teardown=")]
    if not fields.get("python"):
        fields["command"] = (sys.executable, *fields["command"][1:])
    fields |= {
        "name": run.name,
        "output": f"{str(run.job).replace('%', '%%')}/{Path(recorded['output']).name}",
        "batch": (*batch_command(run), *teardown),
        "allocation": None,
        "groups": tuple(
            Job(**{name: moved(value) for name, value in group.items()})
            for group in recorded.get("groups", ())
        ),
    }
    return Job(**fields), recipes
