"""Everything that the records of an attempt say about how it ended, gathered for root_cause."""

import errno
import math
import os
import re
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

from rollcall.launch.runs import find
from rollcall.launch.runs.output import nodes_of_ranks
from rollcall.records import attempt as records
from rollcall.records.attempt import AGENT, AttemptRecord, NodeState, RankEnd, RankFailure
from rollcall.records.run_dir import RunDir
from rollcall.system.files import tail

STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
NO_ROOM = "|".join(rf"\[Errno {number}\]" for number in STORAGE_ERRORS)
"""Matches what a failed save says if the disk, and not the run, was at fault."""
LINES = 10
"""Lines at the end of a log in which to look for the error of a rank that recorded none."""


@dataclass(frozen=True)
class Evidence:
    """The records of an attempt, from all its nodes."""

    attempt: AttemptRecord
    failures: list[RankFailure] = field(default_factory=list)  # one per rank at most, by time
    ends: dict[int, RankEnd] = field(default_factory=dict)  # of the ranks that ended, by rank
    nodes: dict[int, NodeState] = field(default_factory=dict)  # of the nodes that came, by number
    gave_up: list[records.GaveUp] = field(default_factory=list)  # supervisors
    lost: records.NodeFailure | None = None  # the node whose supervisor was silent, if one was
    last_seen: dict[int, int] = field(default_factory=dict)  # attempt, by node that is gone since
    last_lines: dict[int, str] = field(default_factory=dict)  # end of the log, by failed rank
    hang: str = ""  # what the training's watchdog found
    slurm: str = ""  # how Slurm ended the job, in words
    places: dict[int, int] = field(default_factory=dict)  # node, by rank that has a log
    has_stepped: bool = False  # a training that completed a step in this attempt
    storage: str = ""  # why nothing can be written to the run directory any more


def gather(run: RunDir, attempt: AttemptRecord, slurm: str = "") -> Evidence:
    """Read what there is about an attempt."""
    logs = run.attempt_logs(attempt.number)
    ends = RankEnd.of_attempt(logs)
    ends = {rank: end for rank, end in ends.items() if 0 <= rank < attempt.ranks}
    failures = _one_per_rank(RankFailure.of_attempt(logs), ends)
    # The message of a rank that wrote one says enough; a large job has thousands of logs.
    silent = [failure for failure in failures if failure.who == AGENT or not failure.error]
    ranks = {failure.rank: failure.node or 0 for failure in silent if failure.rank is not None}
    lines = {rank: tail(run.log(attempt.number, node, rank)) for rank, node in ranks.items()}
    nodes = _nodes(run, attempt.number)
    key = _key(run, attempt)
    lost = records.NodeFailure.read(run.path, key=key)
    return Evidence(
        attempt,
        failures,
        ends,
        nodes,
        list(records.GaveUp.read_all(run.path, key=key).values()),
        lost if lost is not None and lost.is_lost else None,
        _last_seen(run, attempt, nodes),
        {rank: "\n".join(last[-LINES:]) for rank, last in lines.items()},
        _hang(run, attempt),
        slurm,
        nodes_of_ranks(logs),
        bool(_events(run, attempt, "first_step")),
        _storage(run, attempt, nodes),
    )


def gather_by_hand(run: RunDir) -> Evidence | None:
    """Read what the ranks of a run without a launcher wrote, since it started last."""
    started = run.read_events("started")[-1:]
    if not started or find.attempts(run):
        return None
    all_failures = RankFailure.of_attempt(run.logs_by_hand)
    failures = [failure for failure in all_failures if failure.time >= started[0]["time"]]
    size = started[0].get("world_size")
    ranks = size if isinstance(size, int) else len(failures)
    attempt = AttemptRecord(0, "", [""], ranks, started[0]["time"])
    return Evidence(attempt, failures, hang=_hang(run, attempt)) if failures else None


def _one_per_rank(failures: list[RankFailure], ends: dict[int, RankEnd]) -> list[RankFailure]:
    """Keep the report that knows most of each rank, with the time at which the rank ended."""
    reports: dict[str, RankFailure] = {}
    for failure in failures:
        is_rank = failure.rank is not None
        key = f"rank {failure.rank}" if is_rank else f"{failure.who} {failure.node}"
        # The agent knows only how the process ended; a rank, or the supervisor, knows why.
        if key not in reports or reports[key].who == AGENT:
            reports[key] = failure
    for key, failure in reports.items():
        end = ends.get(failure.rank) if failure.rank is not None else None
        if failure.who == AGENT and end is not None:  # the agent writes its report at its own end
            reports[key] = replace(failure, time=end.time)
    return sorted(reports.values(), key=lambda failure: failure.time)


def _nodes(run: RunDir, attempt: int) -> dict[int, NodeState]:
    return {part.node: part for part in NodeState.read_all(run.path, attempt=attempt).values()}


def _key(run: RunDir, attempt: AttemptRecord) -> str:
    """Return the key of the round that was this attempt; a name of no file if it is unknown."""
    rounds = records.Rendezvous.read_all(run.path)
    names = [path.name for path, known in rounds.items() if known.attempt == attempt.number]
    return names[-1].removesuffix(".json") if names else "-"


def _last_seen(run: RunDir, attempt: AttemptRecord, nodes: dict[int, NodeState]) -> dict[int, int]:
    """Find the nodes that did not come, and whose supervisor ended without a word before that."""
    last_attempts: dict[int, int] = {}
    for earlier in find.attempts(run):
        if earlier.job == attempt.job and earlier.number < attempt.number:
            before = _nodes(run, earlier.number)
            for number, part in before.items():
                is_known = number < len(attempt.hosts)
                if is_known and number not in nodes and part.state == "running":
                    last_attempts[number] = earlier.number
    return last_attempts


def _hang(run: RunDir, attempt: AttemptRecord) -> str:
    reasons = (str(event.get("reason")) for event in _events(run, attempt, "failed"))
    return next((reason for reason in reasons if reason.startswith("hang after step")), "")


def _events(run: RunDir, attempt: AttemptRecord, name: str) -> list[dict[str, Any]]:
    starts = [later.started for later in find.attempts(run) if later.number > attempt.number]
    end = min(starts, default=math.inf)
    return [event for event in run.read_events(name) if attempt.started <= event["time"] < end]


def _storage(run: RunDir, attempt: AttemptRecord, nodes: dict[int, NodeState]) -> str:
    """Find out if a broken disk explains an end that nobody wrote down; empty if not."""
    if attempt.state is not None and all(part.state != "running" for part in nodes.values()):
        return ""
    if problem := storage_problem(run):
        return problem
    texts = (str(event.get("reason")) for event in _events(run, attempt, "save_failed"))
    text = next((text for text in texts if re.search(NO_ROOM, text)), "")
    return f"{run.path} could not be written to: {text}" if text else ""


def storage_problem(run: RunDir) -> str:
    """Return the reason that the run directory takes no files; empty if it takes some."""
    try:
        with tempfile.TemporaryFile(dir=run.path) as file:
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno == errno.ENOENT:
            return f"the run directory {run.path} is gone"
        if error.errno in STORAGE_ERRORS:
            return f"nothing can be written to {run.path}: {error.strerror}"
    return ""
