"""Identify this node and its job, by Slurm's step, submitit's local task, or this machine."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollcall.launch.scheduler.job import RANKS_WITHOUT_GPU
from rollcall.system import hosts
from rollcall.system.process import stat


class NodeError(Exception):
    """The variables that say which node of its job this process is are inconsistent."""


@dataclass(frozen=True)
class Node:
    """One node's part of a job."""

    number: int  # 0 is the head
    count: int  # nodes of the job
    hosts: tuple[str, ...]  # in order; all the same if one machine simulates all nodes
    job: str  # its id
    key: str  # identifies this start of the job; the same on all its nodes
    gpus: str | None  # as CUDA_VISIBLE_DEVICES lists them; None leaves that variable
    default_ranks: int  # started unless the user says otherwise

    @property
    def is_head(self) -> bool:
        """True for the node that speaks for the job."""
        return self.number == 0

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.hosts[self.number]

    @property
    def peer(self) -> str | None:
        """Another host of the job, to find which local address routes to it; None on one host."""
        others = [name for name in self.hosts if name != self.host]
        return (self.hosts[0] if self.number else others[0]) if others else None


def find(env: Mapping[str, str]) -> Node:
    """Return the node that this process is; raise NodeError if its variables contradict that."""
    if "SUBMITIT_LOCAL_JOB_ID" in env:
        return _local(env)
    # Only a step has this variable: batch scripts and salloc shells have the others too.
    if "SLURM_STEP_ID" in env:
        return _slurm(env)
    host = socket.gethostname()
    job = time.strftime("%Y%m%d-%H%M%S")
    key = f"local-{os.getpid()}-{time.time_ns()}"
    return Node(0, 1, (host,), job, key, None, len(visible_gpus(env)) or RANKS_WITHOUT_GPU)


def job_of(env: Mapping[str, str]) -> str:
    """Return the name by which Slurm knows the job of this process and no other job.

    The last task of an array has the same number as the whole array. Slurm's commands would apply
    that number to all tasks, so the task is called `12_3` instead.
    """
    number = env["SLURM_JOB_ID"]
    # In a job that an array task submitted, the other variables are that task's (22.05).
    if number == env.get("SLURM_ARRAY_JOB_ID"):
        return f"{number}_{env['SLURM_ARRAY_TASK_ID']}"
    return number


def start_of(job: str, env: Mapping[str, str]) -> str:
    """Identify this start of a Slurm job; a requeued job has another one."""
    return f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}"


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """List the NVIDIA GPUs that CUDA would show, from CUDA_VISIBLE_DEVICES or the driver."""
    if "CUDA_VISIBLE_DEVICES" in env:
        names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1", "NoDevFiles")]
    cards = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(cards.iterdir())) if cards.is_dir() else 0)]


def _slurm(env: Mapping[str, str]) -> Node:
    try:
        number, count = int(env["SLURM_NODEID"]), int(env["SLURM_STEP_NUM_NODES"])
        tasks = int(env["SLURM_STEP_NUM_TASKS"])
        names = hosts.of_step(env)
        job = job_of(env)
    except (KeyError, ValueError) as error:
        raise NodeError(f"this Slurm step's variables are incomplete: {error}") from None
    if tasks != count:
        raise NodeError(
            f"the step has {tasks} tasks on {count} nodes, but one per node is needed (it starts "
            "that node's ranks): use srun --ntasks-per-node=1"
        )
    key = f"{start_of(job, env)}.{env['SLURM_STEP_ID']}"
    gpus = int(env.get("SLURM_GPUS_ON_NODE") or 0)
    return Node(number, count, tuple(names), job, key, None, gpus or RANKS_WITHOUT_GPU)


def _local(env: Mapping[str, str]) -> Node:
    number, count = int(env["SUBMITIT_LOCAL_GLOBALID"]), int(env["SUBMITIT_LOCAL_NTASKS"])
    job = env["SUBMITIT_LOCAL_JOB_ID"]
    # The id is a process id, which may be reused; with the controller's start time it is unique.
    started = stat(job)[19]
    gpus = visible_gpus(env)
    share = gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]
    names, key = (socket.gethostname(),) * count, f"local-{job}-{started}"
    ranks = len(share) or RANKS_WITHOUT_GPU
    return Node(number, count, names, job, key, ",".join(share) if gpus else None, ranks)
