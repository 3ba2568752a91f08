"""Everything that the records of an attempt say about how it ended, gathered for root_cause."""

from dataclasses import dataclass, field, replace

from rollcall.launch.runs import find
from rollcall.launch.runs.log_times import nodes_of_ranks
from rollcall.records.attempt import (
    AGENT,
    AttemptRecord,
    GaveUp,
    NodeFailure,
    NodeState,
    RankEnd,
    RankFailure,
    Rendezvous,
)
from rollcall.records.files import tail
from rollcall.run_dir import RunDir

LINES = 10
"""Lines at the end of a log in which to look for the error of a rank that recorded none."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt, from all its nodes."""

    attempt: AttemptRecord
    failures: list[RankFailure] = field(default_factory=list)  # one per rank at most, by time
    ends: dict[int, RankEnd] = field(default_factory=dict)  # of the ranks that ended, by rank
    nodes: dict[int, NodeState] = field(default_factory=dict)  # of the nodes that came, by number
    gave_up: list[GaveUp] = field(default_factory=list)  # supervisors
    lost: NodeFailure | None = None  # the node whose supervisor was silent, if one was
    last_seen: dict[int, int] = field(default_factory=dict)  # attempt, by node that is gone since
    last_lines: dict[int, str] = field(default_factory=dict)  # end of the log, by failed rank
    hang: str = ""  # what the training's watchdog found
    slurm: str = ""  # how Slurm ended the job, in words
    places: dict[int, int] = field(default_factory=dict)  # node, by rank that has a log

    def host_of(self, rank: int) -> tuple[int, str]:
        """Return the number and the host of the node that a rank was on."""
        hosts = self.attempt.hosts
        on_each = max(1, self.attempt.ranks // len(hosts))  # if all nodes have the same number
        node = min(self.places.get(rank, rank // on_each), len(hosts) - 1)
        return node, hosts[node]


def gather(run: RunDir, attempt: AttemptRecord, slurm: str = "") -> Evidence:
    """Read what there is about an attempt."""
    ends = RankEnd.of_attempt(run.attempt_logs(attempt.number))
    ends = {rank: end for rank, end in ends.items() if 0 <= rank < attempt.ranks}
    failures = _one_per_rank(find.failures(run, attempt), ends)
    ranks = {each.rank: each.node or 0 for each in failures if each.rank is not None}
    logs = {rank: tail(run.log(attempt.number, node, rank)) for rank, node in ranks.items()}
    nodes = _nodes(run, attempt.number)
    key = _key(run, attempt)
    lost = NodeFailure.read(run.path, key=key)
    return Evidence(
        attempt,
        failures,
        ends,
        nodes,
        list(GaveUp.read_all(run.path, key=key).values()),
        lost if lost is not None and lost.is_lost else None,
        _last_seen(run, attempt, nodes),
        {rank: "\n".join(lines[-LINES:]) for rank, lines in logs.items()},
        _hang(run, attempt),
        slurm,
        nodes_of_ranks(run.attempt_logs(attempt.number)),
    )


def gather_by_hand(run: RunDir) -> Evidence | None:
    """Read what the ranks of a run without a launcher wrote, since it started last."""
    started = run.read_events("started")[-1:]
    if not started or find.attempts(run):
        return None
    found = RankFailure.of_attempt(run.logs_by_hand)
    failures = [failure for failure in found if failure.time >= started[0]["time"]]
    size = started[0].get("world_size")
    ranks = size if isinstance(size, int) else len(failures)
    attempt = AttemptRecord(0, "", [""], ranks, started[0]["time"])
    return Evidence(attempt, failures, hang=_hang(run, attempt)) if failures else None


def _one_per_rank(failures: list[RankFailure], ends: dict[int, RankEnd]) -> list[RankFailure]:
    """Keep the report that knows most of each rank, with the time at which the rank ended."""
    found: dict[str, RankFailure] = {}
    for failure in failures:
        is_rank = failure.rank is not None
        key = f"rank {failure.rank}" if is_rank else f"{failure.who} {failure.node}"
        # The agent knows only how the process ended; a rank, or the supervisor, knows why.
        if key not in found or found[key].who == AGENT:
            found[key] = failure
    for key, failure in found.items():
        end = ends.get(failure.rank) if failure.rank is not None else None
        if failure.who == AGENT and end is not None:  # the agent writes its report at its own end
            found[key] = replace(failure, time=end.time)
    return sorted(found.values(), key=lambda failure: failure.time)


def _nodes(run: RunDir, attempt: int) -> dict[int, NodeState]:
    return {part.node: part for part in NodeState.read_all(run.path, attempt=attempt).values()}


def _key(run: RunDir, attempt: AttemptRecord) -> str:
    """Return the key of the round that was this attempt; a name of no file if it is unknown."""
    found = Rendezvous.read_all(run.path)
    names = [path.name for path, each in found.items() if each.attempt == attempt.number]
    return names[-1].removesuffix(".json") if names else "-"


def _last_seen(run: RunDir, attempt: AttemptRecord, nodes: dict[int, NodeState]) -> dict[int, int]:
    """Find the nodes that did not come, and whose supervisor ended without a word before that."""
    found: dict[int, int] = {}
    for earlier in find.attempts(run):
        if earlier.job == attempt.job and earlier.number < attempt.number:
            before = _nodes(run, earlier.number)
            for number, part in before.items():
                is_known = number < len(attempt.hosts)
                if is_known and number not in nodes and part.state == "running":
                    found[number] = earlier.number
    return found


def _hang(run: RunDir, attempt: AttemptRecord) -> str:
    for event in run.read_events("failed"):
        reason = event.get("reason")
        if event["time"] >= attempt.started and str(reason).startswith("hang after step"):
            return str(reason)
    return ""
