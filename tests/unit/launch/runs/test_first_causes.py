"""Which cause is found, by records of runs on three nodes as their processes write them.

Each fault is planted on the first, the middle and the last node, with one rank per node and two,
and with clocks of the nodes that differ by a second. The campaign first_causes.py plants them for
real.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcall.launch.runs import evidence, find, root_cause
from rollcall.launch.runs.decision import has_failed
from rollcall.launch.runs.evidence import Evidence
from rollcall.records.attempt import (
    AGENT,
    OUT_OF_MEMORY,
    SUPERVISOR,
    AttemptEvent,
    AttemptRecord,
    GaveUp,
    NodeFailure,
    NodeState,
    RankEnd,
    RankFailure,
    Rendezvous,
)
from rollcall.records.run_dir import RunDir
from rollcall.system.files import append_line

NODES = 3
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
TIMED_OUT = "RuntimeError: Timed out waiting 5000ms for recv operation to complete"
NOT_MET = "not all of the 3 nodes met at 10.0.0.1:20000: wait timeout after 600000ms"
CRASHED = "nothing more was heard of node {node} "


class Planted:
    """The records of a run in which one node, or its last rank, is at fault."""

    def __init__(self, run: RunDir, node: int, per_node: int, skew: float) -> None:
        self.run, self.node, self.per_node, self.skew = run, node, per_node, skew
        self.rank = node * per_node + per_node - 1
        self.hosts = [f"n{number}" for number in range(NODES)]
        run.job.mkdir(parents=True)
        self.start(0)

    def start(self, attempt: int) -> None:
        """Begin an attempt."""
        for node in range(NODES):
            self.logs(node, attempt).mkdir(parents=True)
        ranks = NODES * self.per_node
        event = AttemptEvent(attempt, "7", "started", 100.0, hosts=self.hosts, ranks=ranks)
        event.append(self.run.path)
        (self.run.job / "rendezvous").mkdir(exist_ok=True)
        NodeState.path_in(self.run.path, attempt=attempt, node=0).parent.mkdir()
        key = f"7.0.0.{attempt}" if attempt else "7.0.0"
        Rendezvous(attempt, "n0", "10.0.0.1", 2000, self.per_node).write(self.run.path, key=key)

    def logs(self, node: int, attempt: int = 0) -> Path:
        return self.run.log(attempt, node, 0).parent

    def time(self, node: int, seconds: float) -> float:
        """A time by the clock of a node; the clock of the node at fault is ahead."""
        return 200.0 + seconds + self.skew * (node == self.node)

    def state(self, node: int, state: str, code: int | None = None, **more: object) -> None:
        part = NodeState(0, node, self.hosts[node], state, 100.0, 1, 210.0, code, **more)  # type: ignore[arg-type]
        part.write(self.run.path)

    def failed(
        self, rank: int, code: int, error: str, who: str = "", log: str = "", at: float = 0.0
    ) -> None:
        """Write how a rank ended, and its log."""
        node = rank // self.per_node
        time = self.time(node, at)
        if code:
            found = RankFailure(time, self.hosts[node], code, error, rank, who or f"rank-{rank}")
            found.write(self.logs(node))
        if who != SUPERVISOR:
            RankEnd(time, rank, code).append(self.logs(node))
        self.run.log(0, node, rank).write_text(log or f"step 20\n{error}\n")

    def victims(self, error: str = CLOSED, but_node: bool = False) -> None:
        """Let all other ranks lose their peers; with `but_node`, the ranks of other nodes only."""
        for rank in range(NODES * self.per_node):
            node = rank // self.per_node
            if rank != self.rank and not (but_node and node == self.node):
                self.failed(rank, 1, error, at=0.1)
        for node in range(NODES):
            if node != self.node:
                self.state(node, "failed", 1)


def exits_in_order(it: Planted) -> None:
    it.failed(it.rank, 0, "")
    it.state(it.node, "finished" if it.per_node == 1 else "failed", 0 if it.per_node == 1 else 1)
    it.victims()


def leaves_with_75(it: Planted) -> None:
    """As one rank that was asked to stop alone; the parent of the last rank has nothing to say."""
    it.failed(it.rank, 75, "")
    (it.logs(it.node) / f"rank-{it.rank}.failed.json").unlink()
    it.state(it.node, "failed", 1)
    it.victims()


def leaves_with_2_in_training(it: Planted) -> None:
    append_line(it.run.events, {"time": 150.0, "event": "first_step", "step": 1, "steps": 9})
    it.failed(it.rank, 2, "", log="step 20\n")
    it.state(it.node, "failed", 2)
    it.victims()


def refuses(it: Planted) -> None:
    append_line(it.run.events, {"time": 50.0, "event": "first_step", "step": 1, "steps": 9})
    it.failed(it.rank, 2, "", log="rollcall: error: optim.lr\n")
    it.state(it.node, "failed", 2)
    it.victims()


def all_leave_for_one(it: Planted, code: int = 1) -> None:
    """All ranks leave because a rank lost its data worker; rank 0 writes the sentence."""
    append_line(it.run.events, {"time": 150.0, "event": "first_step", "step": 1, "steps": 9})
    said = f"rollcall: error: rank {it.rank}: data worker 0 exited with code 0, 3 times\n"
    for rank in range(NODES * it.per_node):
        it.failed(rank, code, "", log="step 1\n" if rank else f"step 1\n{said}", at=rank / 100)
    for node in range(NODES):
        it.state(node, "failed", code)


def all_refuse_for_a_sample(it: Planted) -> None:
    """All ranks leave because a rank cannot read a sample."""
    all_leave_for_one(it, 2)
    said = f"rollcall: error: rank {it.rank} cannot read sample 7 of the training data: KeyError\n"
    it.run.log(0, 0, 0).write_text(said)


def hangs_each_time(it: Planted) -> None:
    """The watchdogs of all ranks end them in the same way."""
    reason = f"hang after step 5, no progress for 9 s: rank {it.rank} on n{it.node} was asleep; "
    reason += "stacks of all ranks: hang/1"
    for attempt in (0, 1):
        event = {"time": 150.0 + 1000 * attempt, "event": "failed", "step": 5, "reason": reason}
        append_line(it.run.events, event)
    for rank in range(NODES * it.per_node):
        it.failed(rank, 1, "", log="step 5\n", at=rank / 100)
    for node in range(NODES):
        it.state(node, "failed", 1)


def memory_runs_out(it: Planted) -> None:
    it.failed(it.rank, 137, f"rank was ended by SIGKILL, {OUT_OF_MEMORY}; its output", AGENT)
    it.state(it.node, "failed", 137)
    it.victims()


def disk_is_full(it: Planted) -> None:
    """Nothing was written any more: the supervisors seem to run."""
    reason = "[Errno 28] No space left on device: 'step-30'"
    append_line(it.run.events, {"time": 150.0, "event": "save_failed", "reason": reason})
    for node in range(NODES):
        (it.logs(node) / f"rank-{node * it.per_node}.log").touch()
        it.state(node, "running")


def raises(it: Planted) -> None:
    it.failed(it.rank, 1, "ValueError: a bad sample")
    it.state(it.node, "failed", 1)
    it.victims()


def exits_silently(it: Planted) -> None:
    it.failed(it.rank, 3, "", log="step 20\n")
    it.state(it.node, "failed", 3)
    it.victims()


def loses_its_data(it: Planted) -> None:
    it.failed(it.rank, 1, "ConnectionRefusedError: the data server", at=-2.0)
    it.state(it.node, "failed", 1)
    it.victims()


def is_killed(it: Planted) -> None:
    it.failed(it.rank, 137, "rank was ended by SIGKILL", AGENT)
    it.state(it.node, "failed", 137)
    it.victims()


def aborts(it: Planted) -> None:
    it.failed(it.rank, 134, "rank was ended by SIGABRT", AGENT, log="step 20\nfree(): invalid\n")
    it.state(it.node, "failed", 134)
    it.victims()


def peers_abort(it: Planted) -> None:
    it.failed(it.rank, 0, "")
    it.state(it.node, "finished", 0)
    for node in {0, 1, 2} - {it.node}:
        for rank in range(node * it.per_node, (node + 1) * it.per_node):
            it.failed(rank, 134, "rank was ended by SIGABRT", AGENT, log="NCCL error\n", at=0.1)
        it.state(node, "failed", 134)


def is_stopped(it: Planted) -> None:
    error = f"rank {it.rank} was stopped, as by SIGSTOP, so it was killed after 5 s"
    it.failed(it.rank, 137, error, SUPERVISOR)
    it.failed(it.rank, 137, "rank was ended by SIGKILL", AGENT, at=0.3)
    it.state(it.node, "failed", 137)
    it.victims()


def hangs(it: Planted) -> None:
    it.state(it.node, "failed", 137, is_victim=True)
    it.victims(TIMED_OUT)


def parent_is_killed(it: Planted) -> None:
    it.state(it.node, "failed", 137)
    it.victims(but_node=True)


def supervisor_is_killed(it: Planted) -> None:
    it.state(it.node, "running")
    it.victims(but_node=True)


def supervisor_is_killed_and_others_restart(it: Planted) -> None:
    supervisor_is_killed(it)
    it.start(1)
    lost = NodeFailure(it.node, it.hosts[it.node], "silent", leaves=True, is_lost=True)
    lost.write(it.run.path, key="7.0.0.1")
    for node in {0, 1, 2} - {it.node}:
        state = "running" if node == 0 else "failed"  # whoever started the head ends it then
        NodeState(1, node, it.hosts[node], state, 1.0, 1, 2.0, 137, True).write(it.run.path)  # type: ignore[arg-type]
        RankFailure(2.0, it.hosts[node], 1, NOT_MET, None, AGENT).write(it.logs(node, 1))


def supervisor_gives_up(it: Planted) -> None:
    host = it.hosts[it.node]
    NodeFailure(it.node, host, "2 ranks, not 1", leaves=True).write(it.run.path, key="7.0.0")
    GaveUp(it.node, host, "2 ranks, not 1").write(it.run.path, key="7.0.0")
    for node in {0, 1, 2} - {it.node}:
        it.state(node, "failed", 137, is_victim=True)


def supervisor_gives_up_second(it: Planted) -> None:
    """Another node was the first to say that it has failed, because it lost this one."""
    supervisor_gives_up(it)
    other = (it.node + 1) % NODES
    NodeFailure(other, it.hosts[other], "its ranks ended").write(it.run.path, key="7.0.0")
    it.victims(but_node=True)


def never_comes(it: Planted) -> None:
    for node in {0, 1, 2} - {it.node}:
        it.state(node, "failed", 1)
        RankFailure(it.time(node, 0), it.hosts[node], 1, NOT_MET, None, AGENT).write(it.logs(node))


def is_asked_to_stop(it: Planted) -> None:
    for rank in range(it.node * it.per_node, it.rank + 1):
        it.failed(rank, 143, "rank was ended by SIGTERM", AGENT)
    it.state(it.node, "failed", 143, asked="SIGTERM")
    it.victims(but_node=True)


ON_RANK = r"^rank {rank} on n{node} \(node {node}\) "
CAUSES: dict[Callable[[Planted], None], str] = {
    exits_in_order: ON_RANK + "ended with exit code 0",
    leaves_with_75: ON_RANK + "ended with exit code 75, before the other ranks had finished",
    leaves_with_2_in_training: ON_RANK + "ended with exit code 2",
    refuses: ON_RANK + "refused the request",
    all_leave_for_one: ON_RANK[:-1] + ": data worker 0 exited with code 0, 3 times",
    all_refuse_for_a_sample: ON_RANK + "cannot read sample 7 of the training data: KeyError",
    hangs_each_time: "^hang after step 5, .* rank {rank} on n{node} was asleep$",
    memory_runs_out: ON_RANK + f"was ended by SIGKILL, {OUT_OF_MEMORY}$",
    disk_is_full: "could not be written to: .Errno 28. No space left",
    raises: ON_RANK + "raised ValueError",
    exits_silently: ON_RANK + "ended with exit code 3",
    loses_its_data: ON_RANK + "raised ConnectionRefusedError",
    is_killed: ON_RANK + "was ended by SIGKILL",
    aborts: ON_RANK + "was ended by SIGABRT",
    peers_abort: ON_RANK + "ended with exit code 0",
    is_stopped: r"on n{node} \(node {node}\) rank {rank} was stopped",
    hangs: ON_RANK + "did not reach",
    parent_is_killed: r"parent of the ranks on node {node} \(n{node}\) was ended by SIGKILL",
    supervisor_is_killed: CRASHED,
    supervisor_is_killed_and_others_restart: CRASHED + ".* since attempt 0",
    supervisor_gives_up: r"node {node} \(n{node}\) gave up: 2 ranks, not 1",
    supervisor_gives_up_second: r"node {node} \(n{node}\) gave up: 2 ranks, not 1",
    never_comes: r"node {node} \(n{node}\) never came",
    is_asked_to_stop: r"node {node} \(n{node}\) was asked to stop by SIGTERM",
}
PLANTED = list(itertools.product(CAUSES, range(NODES), (1, 2), (0.0, 1.0)))


@pytest.mark.parametrize(("plant", "node", "per_node", "skew"), PLANTED)
def test_the_first_cause_is_found(
    tmp_path: Path, plant: Callable[[Planted], None], node: int, per_node: int, skew: float
) -> None:
    if plant is hangs and per_node == 2:
        per_node = 1  # the parent of two ranks kills the one that hangs
    it = Planted(RunDir(tmp_path, "it"), node, per_node, skew)
    plant(it)
    attempt = find.newest_attempt(it.run)
    assert attempt is not None
    cause = root_cause.decide(evidence.gather(it.run, attempt))
    assert cause is not None
    expected = CAUSES[plant].format(node=node, rank=it.rank)
    assert re.search(expected, cause.what), cause
    assert plant is not disk_is_full or "could not start" not in cause.consequences
    others = {str(number) for number in range(NODES)} - {str(node)}
    assert not others & set(re.findall(r"\bnode (\d)", cause.what)), cause


def test_a_rank_that_leaves_first_is_named_whatever_its_exit_code_is() -> None:
    attempt = AttemptRecord(0, "7", ["n0", "n1"], 2, 100.0)
    victim = RankFailure(200.1, "n0", 1, CLOSED, 0, "rank-0", 0)
    for code in range(256):
        ends = {0: RankEnd(200.1, 0, 1), 1: RankEnd(200.0, 1, code)}
        report = RankFailure(200.0, "n1", code, "", 1, "rank-1", 1)
        failures = [*([report] if has_failed(code) else []), victim]
        cause = root_cause.decide(Evidence(attempt, failures, ends, has_stepped=True))
        assert cause is not None and cause.what.startswith(
            f"rank 1 on n1 (node 1) ended with exit code {code}"
        ), cause
