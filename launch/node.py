"""Which node of which job is this process? Slurm's step, submitit's local task, or this machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.job import RANKS_WITHOUT_GPU
from train import hosts


class NodeError(Exception):
    """The place of this process in its job does not fit together; the message says where."""


@dataclass(frozen=True)
class Node:
    """One node's part of a job.

    Attributes:
        number: 0 is the head.
        count: nodes of the job.
        hosts: their names, in order; all the same when one machine plays all of them.
        job: the id of the job.
        key: names this start of the job, equal on all its nodes and no other start's.
        gpus: GPUs that are this node's, as CUDA_VISIBLE_DEVICES names them; None leaves it as is.
        default_ranks: how many ranks suit it.
    """

    number: int
    count: int
    hosts: tuple[str, ...]
    job: str
    key: str
    gpus: str | None
    default_ranks: int

    @property
    def is_head(self) -> bool:
        """Whether this node speaks for the job."""
        return self.number == 0

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.hosts[self.number]

    @property
    def peer(self) -> str | None:
        """A host to which the way tells the address: another one's; None if all are this one."""
        others = [name for name in self.hosts if name != self.host]
        return (self.hosts[0] if self.number else others[0]) if others else None


def find(env: Mapping[str, str]) -> Node:
    """Read the place of this process from its environment.

    Raises:
        NodeError: a Slurm step with several tasks per node, or half of its variables.
    """
    if "SUBMITIT_LOCAL_JOB_ID" in env:
        return _local(env)
    # Only a step has a step id: a batch script and an salloc shell have the other variables too.
    if "SLURM_STEP_ID" in env:
        return _slurm(env)
    host = socket.gethostname()
    job = time.strftime("%Y%m%d-%H%M%S")
    key = f"local-{os.getpid()}-{time.time_ns()}"
    return Node(0, 1, (host,), job, key, None, len(visible_gpus(env)) or RANKS_WITHOUT_GPU)


def job_of(env: Mapping[str, str]) -> str:
    """What Slurm calls the job of this process, and no other job.

    One task of an array has the number of the whole array for its own, by which Slurm's commands
    mean all of the tasks: that one is `12_3`.

    Raises:
        KeyError: there is no job.
    """
    number = env["SLURM_JOB_ID"]
    # Only then: in a job that was submitted by a task, the other variables are that task's (22.05).
    if number == env.get("SLURM_ARRAY_JOB_ID"):
        return f"{number}_{env['SLURM_ARRAY_TASK_ID']}"
    return number


def start_of(job: str, env: Mapping[str, str]) -> str:
    """Names this start of a Slurm job; when Slurm queues it again, the next one has another."""
    return f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}"


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that CUDA would show, by CUDA_VISIBLE_DEVICES or by the driver's list."""
    if "CUDA_VISIBLE_DEVICES" in env:
        names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1", "NoDevFiles")]
    cards = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(cards.iterdir())) if cards.is_dir() else 0)]


def _slurm(env: Mapping[str, str]) -> Node:
    try:
        number, count = int(env["SLURM_NODEID"]), int(env["SLURM_STEP_NUM_NODES"])
        tasks = int(env["SLURM_STEP_NUM_TASKS"])
        names = hosts.expand(env["SLURM_STEP_NODELIST"])
        job = job_of(env)
    except (KeyError, ValueError) as error:
        raise NodeError(f"this Slurm step's variables are incomplete: {error}") from None
    if tasks != count:
        raise NodeError(
            f"the step has {tasks} tasks on {count} nodes, but one per node is needed, which "
            "starts that node's ranks: srun --ntasks-per-node=1"
        )
    key = f"{start_of(job, env)}.{env['SLURM_STEP_ID']}"
    gpus = int(env.get("SLURM_GPUS_ON_NODE") or 0)
    return Node(number, count, tuple(names), job, key, None, gpus or RANKS_WITHOUT_GPU)


def _local(env: Mapping[str, str]) -> Node:
    number, count = int(env["SUBMITIT_LOCAL_GLOBALID"]), int(env["SUBMITIT_LOCAL_NTASKS"])
    job = env["SUBMITIT_LOCAL_JOB_ID"]
    # The id is a process id, which comes again one day; the controller's start time does not.
    started = Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[19]
    gpus = visible_gpus(env)
    share = gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]
    return Node(
        number,
        count,
        (socket.gethostname(),) * count,
        job,
        f"local-{job}-{started}",
        ",".join(share) if gpus else None,
        len(share) or RANKS_WITHOUT_GPU,
    )
