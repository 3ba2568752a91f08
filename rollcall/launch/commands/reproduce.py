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

from rollcall.config import parse, trust
from rollcall.launch.runs import find
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job, render
from rollcall.launch.submission import snapshot
from rollcall.launch.submission.command import carry_out
from rollcall.launch.submission.submission import SubmissionPlan, batch_command
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import word
from rollcall.records.job import JobRecord, Submission
from rollcall.records.run_dir import RunDir


def main(argv: Sequence[str]) -> int:
    """Submit a run again; return the exit code."""
    parser = find.parser("reproduce", __doc__)
    add = parser.add_argument
    add("--name", help="name of the new run (default: RUN-again)")
    add("--local", action="store_true", help="run on this machine, even if it has Slurm")
    add("--dry-run", action="store_true", help="print the script; write nothing")
    add("--wait", action="store_true", help="show the output until the run ends")
    options = parser.parse_args(argv)
    old = find.find(options.run, options.root)
    trust.require_owner(old.path, "the run")
    run = _new_run(old, options.name)
    submission = _plan(old, run, _submit_words(old, run, options.local))
    is_local = options.local or not slurm.is_available()
    return carry_out(replace(submission, wait=options.wait), is_local, options.dry_run)


def _submit_words(old: RunDir, run: RunDir, local: bool) -> list[str]:
    """Return the words after `rollcall submit` that continue the new run, for `requeue`."""
    newest = Submission.newest(old.path)
    words = (newest and newest.argv) or []
    end = words.index("--") if "--" in words else len(words)
    given = [word for word in words[:end] if word not in ("--local", "--wait")]
    given += ["--local"] if local else []
    return [*given, f"--name={run.name}", *words[end:]]


def _new_run(old: RunDir, name: str | None) -> RunDir:
    if name is None:
        return RunDir.unused(old.path.parent, f"{old.name}-again")
    parse([word("run.name", name)])  # refuses an invalid name
    run = RunDir(old.path.parent, name)
    if run.path.exists():
        raise RefusedError(f"--name {name}: {run.path} exists; choose a new name")
    return run


def _plan(old: RunDir, run: RunDir, argv: Sequence[str]) -> SubmissionPlan:
    record = JobRecord.read(old.path)
    path = JobRecord.path_in(old.path)
    if record is None and old.config.is_file():
        raise RefusedError(
            f"run {old.name} was not started by `rollcall submit`, so its code was not copied; to "
            f"train with its configuration: rollcall train {old.config} run.name=NEW"
        )
    try:
        if record is None:
            raise KeyError(str(path))
        recorded = record.as_dict()
        code = snapshot.recorded(old.code, old.job / "source")
        has_launcher = old.launcher.is_dir()
        launcher = snapshot.recorded(old.launcher, old.launcher) if has_launcher else None
        copies = itertools.takewhile(Path.is_dir, map(old.modules, itertools.count()))
        modules = tuple(snapshot.recorded(copy, copy) for copy in copies)
    except KeyError as error:
        raise RefusedError(
            f"run {old.name} cannot be reproduced: {error.args[0]} is missing or damaged; only "
            "`rollcall submit` writes it"
        ) from None
    try:
        job, recipes = _job(old, run, recorded)
        render(job)
    except (KeyError, TypeError, AttributeError, ValueError, RefusedError):
        raise RefusedError(f"run {old.name} cannot be reproduced: {path} is damaged") from None
    return SubmissionPlan(tuple(argv), run, recipes, code, launcher, job, modules=modules)


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

    words = [text for text in recorded["command"] if text.startswith(f"{before}/job/")]
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
