"""A planned submission."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission.snapshot import Snapshot
from rollcall.messages.refusal import RefusedError
from rollcall.records.run_dir import RunDir


class TakenError(RefusedError):
    """Another submission of the run has come first since this one was planned."""


@dataclass(frozen=True, eq=False, repr=False)
class SubmissionPlan:
    """Everything that starting a run needs."""

    argv: tuple[str, ...]
    run: RunDir
    recipes: tuple[Path, ...]  # the user's recipe files, which are copied to `job/`
    code: Snapshot | None  # what to copy to `code/`; None if the run keeps the code that it has
    launcher: Snapshot | None  # what to copy to `job/rollcall/`, if `code/` is the user's code
    job: Job
    is_new: bool = False  # whether the run directory is to be created
    before: int = 0  # how often the run was submitted before
    modules: tuple[Snapshot, ...] = ()  # for `job/modules/`: the user's modules from elsewhere
    remarks: tuple[str, ...] = ()  # what a dry run says about the Python of the job
    later: tuple[Job, ...] = ()  # further jobs of the run, each starting after the one before
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # others in `job/`, by name
    resume: bool = False  # whether to continue a run that has failed or finished
    wait: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)  # of the job's options, by name


def note(text: str) -> None:
    """Print something that the user might not expect."""
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"rollcall: note: {text}", file=sys.stderr, flush=True)
