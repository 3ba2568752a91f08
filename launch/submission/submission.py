"""A planned submission."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollcall.installation import command
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission.snapshot import Snapshot
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir


class TakenError(RefusedError):
    """Another submission has created the run's directory since this one was planned."""


@dataclass(frozen=True, eq=False, repr=False)
class Submission:
    """Everything that starting a run needs.

    Attributes:
        recipes: the user's recipe files, which are copied to `job/`.
        code: what to copy to `code/`; None if the run keeps the code that it has.
        launcher: what to copy to `job/rollcall/`, if `code/` is the user's code.
        is_new: whether the run directory is to be created.
        later: further jobs of the run, each starting after the one before.
        modules: what to copy to `job/modules/`: the user's modules from elsewhere.
        remarks: what a dry run says about the Python of the job.
        files: the text of other files in `job/`, by name.
        resume: whether to continue a run that has failed or finished.
        origins: where the options of the job come from, by name.
    """

    argv: tuple[str, ...]
    run: RunDir
    recipes: tuple[Path, ...]
    code: Snapshot | None
    launcher: Snapshot | None
    job: Job
    is_new: bool = False
    modules: tuple[Snapshot, ...] = ()
    remarks: tuple[str, ...] = ()
    later: tuple[Job, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    wait: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)


def batch_command(run: RunDir) -> tuple[str, ...]:
    """Return the command line that starts the step of a run's jobs."""
    return (*command("batch"), f"--run-dir={run.path}")


def launcher_copy(run: RunDir) -> Path:
    """Return where a run keeps its copy of rollcall if `code/` is the user's code."""
    return run.job / "rollcall"


def modules_copy(run: RunDir, number: int) -> Path:
    """Return where a run keeps its copy of the user's modules from the `number`-th directory."""
    return run.job / "modules" / str(number)


def note(text: str) -> None:
    """Print something that the user might not expect."""
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"rollcall: note: {text}", file=sys.stderr, flush=True)
