"""What can a drill do to a run? Each kind of fault, as it is done from the login node."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from launch import cluster, slurm
from launch.runs import Attempt, Job, NoRunError
from launch.slurm import SlurmError
from train.run import RunDir

TAKEN = 5
"""Seconds for which another job takes the nodes."""


class Target(NamedTuple):
    """A run that trains."""

    run: RunDir
    job: Job
    attempt: Attempt

    @property
    def logs(self) -> Path:
        """Where its ranks write."""
        return self.run.path / "logs" / f"attempt-{self.attempt.number}"

    @property
    def any_rank(self) -> int:
        """One of its ranks, by chance."""
        return random.randrange(self.attempt.ranks)


class Fault(NamedTuple):
    """A fault that has been prepared.

    Attributes:
        plan: what it will do, in words.
        strike: does it.
        is_free: whether the run could have its nodes again; None if it keeps them.
        undo: what to do then.
        is_endured: whether the run is to go on as if there were none.
    """

    plan: str
    strike: Callable[[], object]
    is_free: Callable[[], bool] | None = None
    undo: Callable[[], object] | None = None
    is_endured: bool = False


def preempt(target: Target) -> Fault:
    """Another job of a higher tier takes the nodes."""
    partition = cluster.preempting_partition(_slurm_job(target))
    if partition is None:
        raise NoRunError("no partition here preempts the run's; drill time-limit is the nearest")
    nodes = ",".join(target.attempt.hosts)
    words = ["sbatch", "--parsable", "--output=/dev/null", f"--partition={partition}"]
    words += [f"--nodelist={nodes}", "--exclusive", f"--wrap=sleep {TAKEN}"]
    taker = ""

    def strike() -> None:
        nonlocal taker
        taker = slurm.tell(*words).partition(";")[0]  # with clusters: "17;name"

    plan = f"a job in partition {partition} takes {nodes} for {TAKEN} s"
    return Fault(plan, strike, lambda: slurm.state(taker) in (None, *slurm.FINAL))


def time_limit(target: Target) -> Fault:
    """The job's time limit comes within two minutes."""
    job = _slurm_job(target)
    limit, _ = slurm.times(job)
    update = ("scontrol", "update", f"JobId={job}")

    def strike() -> None:
        minutes = int(slurm.times(job)[1] // 60) + 1  # the answer to the question may take some
        slurm.tell(*update, f"TimeLimit={minutes}")

    return Fault(
        f"the time limit of job {job}, {limit}, comes within two minutes, for this once",
        strike,
        lambda: slurm.state(job) == "PENDING",
        lambda: slurm.tell(*update, f"TimeLimit={limit}"),
    )


def kill_rank(target: Target) -> Fault:
    """A rank is killed, as the kernel does when memory runs out."""
    rank = target.any_rank
    return Fault(f"rank {rank} gets SIGKILL", lambda: _on_nodes(target, "kill-rank", rank))


def hang(target: Target) -> Fault:
    """A rank stops and does not go on."""
    rank = target.any_rank
    return Fault(f"rank {rank} gets SIGSTOP", lambda: _on_nodes(target, "hang", rank))


def kill_node(target: Target) -> Fault:
    """All that a run has on its last node is killed."""
    _slurm_job(target)  # which starts it again
    node = len(target.attempt.hosts) - 1
    host = target.attempt.hosts[node]
    plan = f"the supervisor of node {node} ({host}) gets SIGKILL, and its ranks go with it"
    return Fault(plan, lambda: _on_nodes(target, "kill-node", node))


def full_disk(target: Target) -> Fault:
    """Rank 0 cannot write to any file for a while."""
    plan = "for 5 s every write of rank 0 to a file fails, as on a full disk"
    return Fault(plan, lambda: _on_nodes(target, "full-disk", 0), is_endured=True)


def slow_network(target: Target) -> Fault:
    """The last node's network becomes slow for a while."""
    node = len(target.attempt.hosts) - 1
    if os.geteuid() != 0 or len(set(target.attempt.hosts)) == 1:
        raise NoRunError("slow-network needs a run on several hosts, and root on them for tc")
    plan = f"for 5 s the network of node {node} ({target.attempt.hosts[node]}) has 1 Mbit/s"
    return Fault(plan, lambda: _on_nodes(target, "slow-network", node), is_endured=True)


def corrupt_checkpoint(target: Target) -> Fault:
    """A bit of the newest checkpoint turns, and a rank is killed, so that the run must load one."""
    checkpoints = target.run.checkpoints
    if len(list(checkpoints.glob("step-*"))) < 2:
        raise NoRunError(f"run {target.run.name} has no two checkpoints yet, to fall back to one")
    rank = target.any_rank

    def strike() -> None:
        newest = max(checkpoints.glob("step-*"))
        victim = min(path for path in newest.rglob("*") if path.is_file())
        with victim.open("r+b") as file:
            middle = file.seek(0, 2) // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
        _on_nodes(target, "kill-rank", rank)

    return Fault(f"a bit of the newest checkpoint turns, then rank {rank} gets SIGKILL", strike)


FAULTS: dict[str, Callable[[Target], Fault]] = {
    "preempt": preempt,
    "time-limit": time_limit,
    "kill-rank": kill_rank,
    "kill-node": kill_node,
    "hang": hang,
    "full-disk": full_disk,
    "slow-network": slow_network,
    "corrupt-checkpoint": corrupt_checkpoint,
}


def _slurm_job(target: Target) -> str:
    if target.job.is_local:
        raise NoRunError(f"run {target.run.name} runs without Slurm, whose doing this is")
    return target.job.id


def _on_nodes(target: Target, what: str, number: int) -> None:
    """Run the node's part of a fault, on all nodes: the victim is found where it is."""
    command = [sys.executable, "-m", "launch.strike", what, str(target.logs), str(number)]
    if not target.job.is_local:
        command = [*slurm.step(target.job.id, target.attempt.hosts), *command]
    place = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if "struck" not in done.stdout:
        raise SlurmError(f"{what} {number} did not come about: {done.stderr.strip()}")
