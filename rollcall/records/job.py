"""The files in job/ about a run's jobs, which only launching uses. No torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from rollcall.records.run import Line, Record, Whole
from rollcall.system.files import listed, read_value

RestartCause: TypeAlias = (
    Literal["preempted", "time limit", "asked to stop", "crash"]
    | Literal["lost node", "lost batch process", "srun was killed", "more hosts"]
)
"""Why a run came down and starts again."""


@dataclass(frozen=True)
class JobRecord(Whole):
    """The request of `submit`, for the processes of the job."""

    FILE = "job/job.json"

    run_directory: str  # where the run was when it was submitted
    nodes: int  # how many nodes the run wants
    is_training: bool = True  # whether the ranks run rollcall's own training, not a user's program
    spares: int = 0  # further nodes, which wait
    min_nodes: int | None = None  # the fewest nodes of an elastic run; None if it needs all
    more: dict[str, Any] = field(default_factory=dict)  # what else the script was made from
    continues: bool = True  # whether a restarted program continues its work


@dataclass(frozen=True)
class Submission(Line):
    """A job that was submitted for the run."""

    FILE = "job/submissions.jsonl"

    job: str  # its id
    time: float  # seconds since 1970
    argv: list[str] | None = None  # the command line
    directory: str | None = None  # where it was typed
    versions: dict[str, str] | None = None  # of Python and the packages that matter


@dataclass(frozen=True)
class Restart(Line):
    """Written each time a run starts again in its job, or its job is queued again."""

    FILE = "job/restarts.jsonl"

    time: float
    job: str
    cause: RestartCause  # what brought the run down
    step: int  # what the run had reached; see `decision.is_in_vain`
    hosts: list[str] = field(default_factory=list)  # the hosts that did it, if known
    is_queued: bool = False  # whether the job waits in the queue before the run starts again
    reason: str = ""  # the first cause in a sentence, if it is known

    def __str__(self) -> str:
        hosts = f" ({', '.join(self.hosts)})" if self.hosts else ""
        return self.reason or f"{self.cause}{hosts}"


@dataclass(frozen=True)
class Cancellation(Line):
    """Jobs that a person cancelled with `rollcall cancel`."""

    FILE = "job/cancelled.jsonl"

    jobs: list[str]
    time: float


@dataclass(frozen=True)
class BatchRecord(Whole):
    """A job's first process, and what another host needs to take over from it."""

    FILE = "job/batch.json"

    start: str  # which start of the job it belongs to
    number: int  # how many of this start's batch processes died before
    words: list[str]  # its command line
    output: str  # the file that the job writes its output to
    can_move: bool = True  # whether the job can run without its first host
    process: str | None = None  # its pid namespace, process id and start
    has_ended: bool = False  # whether it ended in order, after requeuing the job if need be


@dataclass(frozen=True)
class Cell(Record):
    """One run of a sweep: its name below the sweep's directory, and its further words."""

    name: str
    words: list[str]

    @staticmethod
    def file_name(submitted: str, first: int) -> str:
        """Return the name in job/ of the list of an array's cells, from the cell `first` on."""
        return f"cells-{submitted}-{first}.json"

    @classmethod
    def read(cls, path: Path, index: int) -> Self | None:
        """Read what a task of an array runs; None if the file does not say."""
        cells = read_value(path)
        return cls.parse(cells[index]) if isinstance(cells, list) and index < len(cells) else None

    @classmethod
    def all_of(cls, path: Path) -> list[Self]:
        """Read all cells of a list; unreadable ones are left out."""
        cells = read_value(path)
        parsed = map(cls.parse, cells if isinstance(cells, list) else [])
        return [cell for cell in parsed if cell is not None]

    @staticmethod
    def are_in(directory: Path) -> bool:
        """Return True for the directory of a sweep."""
        return bool(listed(directory / "job", "cells-*.json"))


def slurm_output(job: Path, job_id: str) -> Path:
    """Return the file in job/ that a Slurm job writes its output to; `%j` means its id."""
    return job / f"slurm-{job_id}.out"


def local_output(job: Path, job_id: str, node: int) -> Path:
    """Return the file in job/ that a simulated node writes its output to, as submitit names it."""
    return job / f"{job_id}_{node}_log.out"


def local_jobs(job: Path) -> set[str]:
    """Return the ids of the jobs that ran on this machine instead of under Slurm."""
    return {path.name.partition("_")[0] for path in listed(job, "*_log.out")}


def submitted_script(job: Path, job_id: str) -> Path:
    """Return the script of a Slurm job in job/, as submitit names it."""
    return job / f"{job_id}_submission.sh"
