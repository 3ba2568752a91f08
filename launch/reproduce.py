"""`python -m launch reproduce RUN`: the same code, program and options again, under a new name.

All of it comes from the run's directory, which may have been moved here from elsewhere. What is
new: the Python that runs it, and a dependency on other jobs is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch import runs, slurm, snapshot
from launch.job import Job
from launch.submission import MISTAKES, RefusedError, Submission, launcher_copy, show
from launch.words import word
from train.config import parse
from train.run import RunDir


def main(argv: Sequence[str]) -> int:
    """Submit a run again; return the exit code."""
    parser = runs.parser("reproduce", __doc__)
    parser.add_argument("--name", help="of the new run (default: that of RUN, and -again)")
    parser.add_argument("--local", action="store_true", help="on this machine, also where Slurm is")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write nothing")
    parser.add_argument("--wait", action="store_true", help="show the output until the end")
    options = parser.parse_args(argv)
    try:
        old = runs.find(options.run, options.root)
        submission = _plan(old, _new_run(old, options.name), argv)
        local = options.local or not slurm.is_available()
        if options.dry_run:
            show(submission, local)
            return 0
        from launch import start  # here, because it imports submitit

        return start.start(replace(submission, wait=options.wait), local)
    except (*MISTAKES, runs.NoRunError) as error:
        return runs.refuse("reproduce", error)


def _new_run(old: RunDir, name: str | None) -> RunDir:
    if name is not None:
        parse([word("run.name", name)])  # refuses what cannot be a name
        run = RunDir(old.path.parent, name)
        if run.path.exists():
            raise RefusedError(f"--name {name}: {run.path} is there already; give a new name")
        return run
    run, number = RunDir(old.path.parent, f"{old.name}-again"), 2
    while run.path.exists():
        run, number = RunDir(old.path.parent, f"{old.name}-again-{number}"), number + 1
    return run


def _plan(old: RunDir, run: RunDir, argv: Sequence[str]) -> Submission:
    try:
        recorded = json.loads((old.job / "job.json").read_text())
        code = snapshot.recorded(old.code, old.job / "source")
        guest = launcher_copy(old).is_dir()
        launcher = snapshot.recorded(launcher_copy(old), old.job / "rollcall") if guest else None
    except (FileNotFoundError, KeyError) as error:
        raise RefusedError(
            f"run {old.name} was not submitted by submit.py, or by an older one: it lacks {error}"
        ) from None
    before = recorded.pop("run_directory")  # where it was then
    recipes = []

    def moved(text: str) -> str:
        if text == before or text.startswith(f"{before}/"):
            return str(run.path) + text[len(before) :]
        return text

    for text in recorded["command"]:
        if text.startswith(f"{before}/job/"):
            recipes.append(old.path / text[len(before) + 1 :])
    recorded["options"].pop("dependency", None)
    recorded |= {
        "name": run.name,
        "command": (sys.executable, *map(moved, recorded["command"][1:])),
        "directory": moved(recorded["directory"]),
        "output": f"{str(run.job).replace('%', '%%')}/{Path(recorded['output']).name}",
        "srun": tuple(recorded["srun"]),
        "setup": tuple(recorded["setup"]),
        "batch": (sys.executable, "-m", "launch", "batch"),
    }
    return Submission(tuple(argv), run, tuple(recipes), code, launcher, Job(**recorded))
