"""A Slurm job as a dataclass, and the pure function that renders it as an sbatch script."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rollcall.launch.scheduler import gpus
from rollcall.launch.scheduler.slurm import seconds
from rollcall.messages.refusal import RefusedError

RANKS_WITHOUT_GPU = 2
"""Ranks of a node without a GPU: two, so that training is distributed there too."""
STOP_LEAD = 120
"""Seconds before the limit, or a quarter of it, at which a run is asked to save and stop."""


@dataclass(frozen=True)
class Job:
    """A run as Slurm gets the request: one task per node, which starts that node's ranks."""

    name: str
    nodes: int  # number of hosts
    command: tuple[str, ...]  # what every node runs, word by word
    directory: str  # working directory: the snapshot of the code
    output: str  # file for the job's output; Slurm replaces `%j` by the job id
    cpus_per_task: int  # CPUs per node, shared by all its ranks
    gpus_per_node: str | None = None  # in sbatch's notation
    mem: str | None = None  # memory per node, in sbatch's notation
    time: str | None = None  # time limit, in sbatch's notation; None uses the partition's
    partition: str | None = None  # None uses the site's default
    # Further sbatch options, by name; None for an option without a value.
    options: Mapping[str, str | None] = field(default_factory=dict)
    srun: tuple[str, ...] = ()  # further arguments for srun
    setup: tuple[str, ...] = ()  # shell lines to run before the command on the first node
    spares: int = 0  # number of further hosts, which stay idle until one is needed
    min_nodes: int | None = None  # how many of `nodes` an elastic job needs; None for all
    batch: tuple[str, ...] = ()  # what starts srun and looks after the job; empty leaves it to srun
    is_training: bool = True  # whether the program is rollcall's own training and not a user's
    continues: bool = True  # whether a restarted program continues its work
    allocation: str | None = None  # the allocation that the user holds and the run uses
    python: tuple[str, ...] = ()  # how `command` begins if it does not use rollcall's own Python
    # Of a heterogeneous job, what each group of hosts asks for; `nodes` counts all hosts.
    groups: tuple["Job", ...] = ()

    @property
    def all_groups(self) -> tuple["Job", ...]:
        """The request of each group of hosts; this job itself if it has a single one."""
        return self.groups or (self,)

    @property
    def gpus(self) -> int:
        """How many GPUs each host has."""
        return sum(gpus.per_node(self.gpus_per_node, self.options).values())


def render(job: Job) -> str:
    """Return the sbatch script of a job; raise RefusedError at a control character in a value."""
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{option}" for option in options(job)]
    for group in job.groups[1:]:
        lines += ["#SBATCH hetjob", *(f"#SBATCH --{option}" for option in _resources(group))]
    # srun of 22.05 to 23.02 does not take --cpus-per-task from sbatch. The supervisors end their
    # nodes: srun would kill a node that is still saving when another one has finished.
    common = "--kill-on-bad-exit=0 --wait=0"
    if job.spares or job.min_nodes:
        count = '"$SLURM_JOB_NUM_NODES"' if job.min_nodes else job.nodes
        common += f" --nodes={count} --ntasks={count} --no-kill"
    common = " ".join([common, *map(_quote, job.srun)])
    command = shlex.join(job.command)
    step = []
    for number, group in enumerate(job.all_groups):
        which = f" --het-group={number}" if job.groups else ""
        own = f"--cpus-per-task={group.cpus_per_task}{which} {common}"
        step += [f": {own}" if number else f"srun {own}", command]
    lines += ["", f"cd {shlex.quote(job.directory)} || exit", *job.setup]
    batch = (*job.batch, *([f"--nodes={job.min_nodes}-{job.nodes}"] if job.min_nodes else []))
    words = [*([shlex.join(batch)] if job.batch else []), *step]
    lines += ["exec " + " \\\n    ".join(words)]
    return "\n".join(lines) + "\n"


def needs_slurm(job: Job) -> list[str]:
    """Return the options that a run without Slurm leaves out."""
    names = {name for group in job.all_groups for name in group.options} - {"array", "gres"}
    for group in job.all_groups:
        names |= {name for name in ("partition", "mem") if getattr(group, name)}
    names |= {"srun-arg"} if job.srun else set()
    names |= {"teardown" for word in job.batch if word.startswith("--teardown=")}
    setup = ["the profile's modules, environment and setup"] if job.setup else []
    return [*setup, *(f"--{name}" for name in sorted(names))]


def render_step(job: Job) -> str:
    """Return the shell lines that run a job as a step of an allocation that the user holds."""
    srun = [
        *("srun", f"--jobid={job.allocation}", f"--nodes={job.nodes}", f"--ntasks={job.nodes}"),
        *("--ntasks-per-node=1", f"--cpus-per-task={job.cpus_per_task}"),
        *("--kill-on-bad-exit=0", "--wait=0", "--open-mode=append"),
        f"--output={job.output.replace('%j', str(job.allocation))}",
    ]
    lines = [f"cd {shlex.quote(job.directory)} || exit", *job.setup]
    return "\n".join([*lines, f"exec {shlex.join([*srun, *job.srun, *job.command])}"]) + "\n"


def array_tasks(text: str) -> tuple[list[int], int | None]:
    """Return the indices of sbatch's `--array` and how many run at once, or raise RefusedError."""
    listed, percent, most = text.partition("%")
    indices: dict[int, None] = {}
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        first, end, step = match.groups("") if match else ("1", "0", "")
        last, step = int(end or first), step or "1"
        is_wrong = last < int(first) or int(step) == 0
        if is_wrong or (percent and not most.strip("0").isdecimal()):
            raise RefusedError(f"--array {text}: expected indices such as 0-7, 1,3,5 or 0-99:10%4")
        indices |= dict.fromkeys(range(int(first), last + 1, int(step)))
    return list(indices), int(most) if percent else None


def options(job: Job) -> Iterator[str]:
    """Yield the options of a job, as after the dashes of #SBATCH; raise like `render`."""
    yield f"job-name={_quote(job.name)}"
    yield from _resources(replace(job, nodes=job.groups[0].nodes) if job.groups else job)
    yield f"output={_quote(job.output)}"
    yield "open-mode=append"
    if not {"requeue", "no-requeue"} & job.options.keys():
        yield "requeue"
    if "mail-user" in job.options and "mail-type" not in job.options:
        yield "mail-type=END,FAIL"  # by default, Slurm sends no mail
    if "signal" not in job.options:
        # B: for the batch shell, which `rollcall batch` has replaced: it passes the signal through
        # srun to the supervisors. Without B:, Slurm signals the ranks too on some clusters, and on
        # others only the supervisors.
        lead = STOP_LEAD if job.time is None else min(STOP_LEAD, seconds(job.time) / 4)
        yield f"signal=B:USR2@{lead:.0f}"


def _resources(job: Job) -> Iterator[str]:
    yield f"nodes={f'{job.min_nodes}-' if job.min_nodes else ''}{job.nodes + job.spares}"
    if job.spares or job.min_nodes:
        yield "no-kill"  # otherwise the job would end when its first host fails
    if not job.min_nodes:  # with it, the job would never grow (22.05)
        yield "ntasks-per-node=1"
    yield f"cpus-per-task={job.cpus_per_task}"
    optional = {"gpus-per-node": job.gpus_per_node, "mem": job.mem}
    optional |= {"time": job.time, "partition": job.partition}
    for option, value in optional.items():
        if value is not None:
            yield f"{option}={_quote(str(value))}"
    for option, text in job.options.items():
        yield option if text is None else f"{option}={_quote(text)}"


def _quote(value: str) -> str:
    """Quote a value for an `#SBATCH` line, which Slurm splits like a shell, but without escapes."""
    return shlex.quote(one_line(value))


def one_line(value: str) -> str:
    """Return a value of a job script; raise RefusedError if it has a control character."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        what = "contains a control character, which a line of a job script cannot express"
        raise RefusedError(f"{value!r} {what}")
    return value
