"""What is a job, and how does it read as an sbatch script? One typed job, one pure function."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
        partition: None takes the site's default.
        options: further options of sbatch, by name; None for one without a value.
        srun: further words for srun.
        setup: shell lines that come before the command on the first node.
        spares: further hosts, which wait.
        min_nodes: with how many of `nodes` an elastic job starts and goes on; None for all of them.
        batch: what starts srun and looks after the job (launch.batch); empty leaves it to srun.
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
    options: Mapping[str, str | None] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    spares: int = 0
    min_nodes: int | None = None
    batch: tuple[str, ...] = ()


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
    if job.spares or job.min_nodes:
        count = '"$SLURM_JOB_NUM_NODES"' if job.min_nodes else job.nodes
        srun += f" --nodes={count} --ntasks={count} --no-kill"
    srun = " ".join([srun, *map(shlex.quote, job.srun)])
    lines += ["", f"cd {shlex.quote(job.directory)} || exit", *job.setup]
    batch = (*job.batch, *([f"--nodes={job.min_nodes}-{job.nodes}"] if job.min_nodes else []))
    words = [*([shlex.join(batch)] if job.batch else []), srun, shlex.join(job.command)]
    lines += ["exec " + " \\\n    ".join(words)]
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    yield f"job-name={_quote(job.name)}"
    yield f"nodes={f'{job.min_nodes}-' if job.min_nodes else ''}{job.nodes + job.spares}"
    if job.spares or job.min_nodes:
        yield "no-kill"  # otherwise the job would end with the first host
    if not job.min_nodes:  # which with this would never have more (22.05)
        yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.cpus_per_task}"
    optional = {
        "gpus-per-node": job.gpus_per_node,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
    }
    for option, value in optional.items():
        if value is not None:
            yield f"{option}={_quote(str(value))}"
    for option, text in job.options.items():
        yield option if text is None else f"{option}={_quote(text)}"
    yield f"output={_quote(job.output)}"
    yield "open-mode=append"
    if "no-requeue" not in job.options:
        yield "requeue"
    if "mail-user" in job.options and "mail-type" not in job.options:
        yield "mail-type=END,FAIL"  # Slurm's default is no mail at all
    if "signal" not in job.options:
        # B: for the batch shell, which launch.batch has replaced: it passes the signal through srun
        # to the supervisors. Without B:, Slurm signals the ranks too on some clusters and on others
        # only the supervisors.
        lead = STOP_LEAD if job.time is None else min(STOP_LEAD, seconds(job.time) / 4)
        yield f"signal=B:USR2@{lead:.0f}"


def _quote(value: str) -> str:
    """A value for an `#SBATCH` line, which Slurm splits like a shell but for its escapes."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise JobError(f"{value!r} holds a control character, which an #SBATCH line cannot carry")
    return shlex.quote(value)
