"""What is a job, and how does it read as an sbatch script? One typed job, one pure function."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from launch.slurm import seconds

RANKS_WITHOUT_GPU = 2
"""Ranks of a node that has no GPU, so that what runs there is distributed too."""
STOP_LEAD = 120
"""Seconds before the time limit at which a run is asked to save and stop, or a quarter of it."""


class JobError(ValueError):
    """A job that no script can express; the message names the value."""


@dataclass(frozen=True)
class Job:
    """A run as Slurm is asked for it: one task per node, which starts that node's ranks.

    Attributes:
        name: the run's name.
        nodes: how many hosts.
        command: what every node runs, word by word.
        directory: where it runs; the code's snapshot.
        output: file of the job's output; `%j` stands for the job id.
        cpus_per_task: CPUs of every node's task, so of all its ranks.
        gpus_per_node: GPUs of every node; None asks for none.
        mem: memory per node, as sbatch spells it.
        time: limit, as sbatch spells it; None takes the partition's.
        partition, account, qos: as at the site; None takes the default.
    """

    name: str
    nodes: int
    command: tuple[str, ...]
    directory: str
    output: str
    cpus_per_task: int
    gpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None


def render(job: Job) -> str:
    """The sbatch script of a job.

    Raises:
        JobError: a value holds a line break or another control character, which no `#SBATCH` line
            can carry.
    """
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{option}" for option in _options(job)]
    # srun of 22.05 to 23.02 does not take --cpus-per-task from sbatch. The supervisors end their
    # nodes themselves: srun would kill a node that still saves because another was quicker.
    srun = f"srun --cpus-per-task={job.cpus_per_task} --kill-on-bad-exit=0 --wait=0"
    command = shlex.join(job.command)
    lines += ["", f"cd {shlex.quote(job.directory)} || exit", f"exec {srun} \\", f"    {command}"]
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    yield f"job-name={_quote(job.name)}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.cpus_per_task}"
    optional = {
        "gpus-per-node": job.gpus_per_node,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
    }
    for option, value in optional.items():
        if value is not None:
            yield f"{option}={_quote(str(value))}"
    yield f"output={_quote(job.output)}"
    yield "open-mode=append"
    yield "requeue"
    # B: for the batch shell, which srun has replaced: srun passes the signal to the supervisors.
    # Without B:, Slurm signals the ranks too on some clusters and on others only the supervisors.
    lead = STOP_LEAD if job.time is None else min(STOP_LEAD, seconds(job.time) / 4)
    yield f"signal=B:USR2@{lead:.0f}"


def _quote(value: str) -> str:
    """A value for an `#SBATCH` line, which Slurm splits like a shell but for its escapes."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise JobError(f"{value!r} holds a control character, which an #SBATCH line cannot carry")
    return shlex.quote(value)
