"""The faults that a drill can inject, seen from the login node."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from rollcall.cli.installation import ROOT
from rollcall.launch.runs.find import NoRunError, SubmittedJob
from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.attempt import AttemptRecord
from rollcall.records.run_dir import RunDir

JOB_SECONDS = 5
"""Duration of the job that takes the nodes of a preempted run."""


class Target(NamedTuple):
    """A run that is training."""

    run: RunDir
    job: SubmittedJob
    attempt: AttemptRecord

    @property
    def any_rank(self) -> int:
        """One of its ranks, at random."""
        return random.randrange(self.attempt.ranks)


class Fault(NamedTuple):
    """A fault that is ready to be injected."""

    plan: str  # a sentence that says what it will do
    inject: Callable[[], object]
    is_free: Callable[[], bool] | None = None  # the run's nodes, again; None if it keeps them
    undo: Callable[[], object] | None = None  # called when they are
    is_endured: bool = False  # whether the run should continue without a restart


def preempt(target: Target) -> Fault:
    """A job of a higher priority tier takes the run's nodes."""
    partition = cluster.preempting_partition(_slurm_job(target))
    if partition is None:
        raise NoRunError("no partition here preempts the run's; try `drill RUN time-limit` instead")
    nodes = ",".join(target.attempt.hosts)
    words = ["sbatch", "--parsable", "--output=/dev/null", f"--partition={partition}"]
    words += [f"--nodelist={nodes}", "--exclusive", f"--wrap=sleep {JOB_SECONDS}"]
    taker = ""

    def inject() -> None:
        nonlocal taker
        taker = slurm.tell(*words).partition(";")[0]  # with clusters: "17;name"

    plan = f"a job in partition {partition} takes {nodes} for {JOB_SECONDS} s"
    return Fault(plan, inject, lambda: slurm.has_ended(taker))


def time_limit(target: Target) -> Fault:
    """The job reaches its time limit within two minutes."""
    job = _slurm_job(target)
    limit, _ = slurm.times(job)
    update = ("scontrol", "update", f"JobId={job}")

    def inject() -> None:
        minutes = int(slurm.times(job)[1] // 60) + 1  # the query itself may take a while
        slurm.tell(*update, f"TimeLimit={minutes}")

    return Fault(
        f"the time limit of job {job}, {limit}, is lowered once to less than two minutes from now",
        inject,
        lambda: slurm.state(job) == "PENDING",
        lambda: slurm.tell(*update, f"TimeLimit={limit}"),
    )


def kill_rank(target: Target) -> Fault:
    """A rank is killed, as by the kernel when memory runs out."""
    rank = target.any_rank
    return Fault(f"rank {rank} gets SIGKILL", lambda: _on_nodes(target, "kill-rank", rank))


def hang(target: Target) -> Fault:
    """A rank is stopped and does not continue."""
    rank = target.any_rank
    return Fault(f"rank {rank} gets SIGSTOP", lambda: _on_nodes(target, "hang", rank))


def kill_node(target: Target) -> Fault:
    """All processes of the run on its last node are killed."""
    _slurm_job(target)  # refuses a local run, which nothing would restart
    node = len(target.attempt.hosts) - 1
    host = target.attempt.hosts[node]
    plan = f"the supervisor of node {node} ({host}) gets SIGKILL, and its ranks go with it"
    return Fault(plan, lambda: _on_nodes(target, "kill-node", node))


def full_disk(target: Target) -> Fault:
    """For a while, rank 0 cannot write to any file."""
    plan = "for 5 s every write of rank 0 to a file fails, as on a full disk"
    return Fault(plan, lambda: _on_nodes(target, "full-disk", 0), is_endured=True)


def slow_network(target: Target) -> Fault:
    """For a while, the network of the last node is slow."""
    node = len(target.attempt.hosts) - 1
    if os.geteuid() != 0 or len(set(target.attempt.hosts)) == 1:
        raise NoRunError("slow-network needs a run on several hosts, and root there to run tc")
    host = target.attempt.hosts[node]
    plan = f"for 5 s the network of node {node} ({host}) is limited to 1 Mbit/s"
    return Fault(plan, lambda: _on_nodes(target, "slow-network", node), is_endured=True)


def corrupt_checkpoint(target: Target) -> Fault:
    """A bit of the newest checkpoint flips; a rank is killed, so that the run loads one."""
    checkpoints = target.run.checkpoints
    if len(list(checkpoints.glob("step-*"))) < 2:
        raise NoRunError(f"run {target.run.name} needs two checkpoints: one to fall back to")
    rank = target.any_rank

    def inject() -> None:
        newest = max(checkpoints.glob("step-*"))
        victim = min(path for path in newest.rglob("*") if path.is_file())
        with victim.open("r+b") as file:
            middle = file.seek(0, 2) // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
        _on_nodes(target, "kill-rank", rank)

    plan = f"a bit of the newest checkpoint is flipped, then rank {rank} gets SIGKILL"
    return Fault(plan, inject)


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
        raise NoRunError(f"run {target.run.name} runs without Slurm, which this drill needs")
    return target.job.id


def _on_nodes(target: Target, what: str, number: int) -> None:
    """Run on_node on all nodes of the run; the node that has the victim injects the fault."""
    logs = target.run.attempt_logs(target.attempt.number)
    module = "rollcall.tools.drill.on_node"
    command = [sys.executable, "-m", module, what, str(logs), str(number)]
    if not target.job.is_local:
        command = [*slurm.on_groups(target.job.id, target.attempt.hosts), *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "injected" not in done.stdout:
        raise SlurmError(f"{what} {number} could not be injected: {done.stderr.strip()}")
