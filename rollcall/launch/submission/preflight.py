"""Check before queueing that a job fits the cluster and that its run directory can be used."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job, array_tasks, options
from rollcall.launch.scheduler.slurm import NoAnswerError, SlurmError
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import note
from rollcall.system.files import closest

MEGABYTES = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
RESTART = 30.0
"""Seconds for which Slurm is asked again if it, or its nodes, do not answer."""
UNFIT = "node configuration is not available"
NODE_OPTIONS = ["cpus-per-task", "gpus-per-node", "gres", "mem", "mem-per-cpu"]
NODE_OPTIONS += ["constraint", "nodelist", "exclude"]
"""Options that restrict the nodes of a job."""
LIMITS = {
    "nodes": "a job in partition {0.name} can have {1:.0f} at most",
    "time": "the limit of partition {0.name} is {0.limit_text}",
    "gpus-per-node": "no node of partition {0.name} has more than {1:.0f} GPUs",
    "gres": "no node of partition {0.name} has more than {1:.0f} GPUs",
    "cpus-per-task": "no node of partition {0.name} has more than {1:.0f} CPUs",
    "mem": "no node of partition {0.name} has more than {1:.0f} MB",
}
REFUSALS: tuple[tuple[str, tuple[str, ...], Literal["nodes", "features", "reservations"]], ...] = (
    ("Invalid node name", ("nodelist", "exclude"), "nodes"),
    ("Invalid feature", ("constraint",), "features"),
    ("reservation is invalid", ("reservation",), "reservations"),
)
"""Messages of sbatch, the options that cause each, and the names to list as valid."""


def problem(root: Path) -> str | None:
    """Return why runs cannot be created in this directory; None if they can."""
    if match := re.search("%[jtaA]", str(root)):
        return f"{root}: Slurm replaces {match[0]} in a path by a number; choose another directory"
    existing = closest(root)
    if not existing.is_dir():
        return f"{existing} is a file; choose another directory"
    if existing not in (root, root.parent):
        made = root.parent
        return f"{made} does not exist, only {existing}; correct --root, or run `mkdir -p {made}`"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing}: you do not have permission to write there"
    return None


def check_root(job: Job, root: Path) -> None:
    """Raise RefusedError if other hosts of a job cannot see its directory of runs."""
    from rollcall.launch.doctor.storage import is_node_local  # here: a dry run does not need it

    if job.nodes > 1 and is_node_local(root):
        needs = f"{job.nodes} nodes need a --root on a shared file system"
        raise RefusedError(f"only this machine can see {root}; {needs}")


def check(job: Job, script: str) -> str:
    """Ask whether Slurm would accept a job; return when and where it expects to start it.

    Slurm may just be restarting, so it is asked again for a while. If it would refuse the job or
    never start it, SlurmError names the option and the valid values.
    """
    end, text = time.monotonic() + RESTART, ""
    while True:
        try:
            return _check(job, script)
        except NoAnswerError as error:
            if time.monotonic() > end:
                raise
            if str(error) != text:
                text = str(error)
                note(f"{text}; asking again for up to {RESTART:.0f} s")
        time.sleep(1.0)


def _check(job: Job, script: str) -> str:
    named = ",".join(group.partition for group in job.all_groups if group.partition)
    known = cluster.partitions(named or None)
    chosen, *_ = [_check_limits(group, known) for group in job.all_groups]
    if array := job.options.get("array"):
        size = int(cluster.configuration("MaxArraySize") or 1001)
        if max(array_tasks(array)[0]) >= size:
            largest = f"{size - 1} (MaxArraySize={size})"
            raise SlurmError(f"--array {array}: the largest index on this cluster is {largest}")
    accepted, message = cluster.test_only(script)
    if accepted:
        start = re.search(r"to start at (\S+) .*processors on (?:nodes )?(\S+)", message)
        return f"expected to start at {start[1]} on {start[2]}" if start else message
    if UNFIT in message:  # nodes that do not answer cannot provide anything, either
        names = [entry.name for entry in chosen]
        count, there = cluster.answering(",".join(names))
        if count < there:
            nodes = f"{count} of {there} nodes of partition {' or '.join(names)} have registered"
            raise NoAnswerError(f"Slurm's controller has just started: {nodes} with it")
    raise SlurmError(_refusal(job, message, chosen))


def _check_limits(job: Job, known: dict[str, cluster.Partition]) -> list[cluster.Partition]:
    """Return the partitions in which a job may run; raise SlurmError if none allows so much."""
    chosen = _chosen(job.partition, known)
    least = job.min_nodes or job.nodes
    nodes = f"{job.nodes} --spares {job.spares}" if job.spares else job.nodes
    nodes = f"{least}-{nodes}" if job.min_nodes else nodes
    of_gpus = "gpus-per-node" if job.gpus_per_node else "gres"
    asked_gpus = job.gpus_per_node or job.options.get("gres")
    seconds = slurm.seconds(job.time) if job.time else None
    if seconds == 0:
        seconds = slurm.UNLIMITED  # as sbatch reads it
    asked: list[tuple[str, object, float | None, Callable[[cluster.Partition], float]]] = [
        ("nodes", nodes, least + job.spares, lambda entry: min(entry.nodes, entry.largest_job)),
        # By default (EnforcePartLimits=NO), Slurm leaves such a job pending for ever.
        ("time", job.time, seconds, lambda entry: entry.limit),
        (of_gpus, asked_gpus, job.gpus, lambda entry: entry.gpus),
        ("cpus-per-task", job.cpus_per_task, job.cpus_per_task, lambda entry: entry.cpus),
        ("mem", job.mem, _megabytes(job.mem or "0"), lambda entry: entry.megabytes),
    ]
    for option, text, value, most in asked:
        best = max(chosen, key=most)
        if value is not None and value > most(best):
            enough = [entry for entry in known.values() if most(entry) >= value]
            hint = f"; partition {min(enough, key=most).name} allows it" if enough else ""
            limit = LIMITS[option].format(best, most(best))
            raise SlurmError(f"--{option} {text}: {limit}{hint}")
    return chosen


def _chosen(names: str | None, known: dict[str, cluster.Partition]) -> list[cluster.Partition]:
    listed = ", ".join(sorted(known))
    if names is None:
        if chosen := [entry for entry in known.values() if entry.is_default]:
            return chosen
        raise SlurmError(f"this cluster has no default partition; add --partition, one of {listed}")
    for name in names.split(","):
        if name not in known:
            raise SlurmError(f"--partition {name}: no such partition; this cluster has {listed}")
    return [known[name] for name in names.split(",")]


def _refusal(job: Job, message: str, chosen: Sequence[cluster.Partition]) -> str:
    if UNFIT in message:
        names = " or ".join(entry.name for entry in chosen)
        kinds = "; or ".join(kind for entry in chosen for kind in entry.kinds)
        nodes = f"{'node' if job.nodes == 1 else f'{job.nodes} nodes'} of partition {names}"
        given = (option.partition("=") for option in options(job))
        needs = ", ".join(f"--{name} {text}" for name, _, text in given if name in NODE_OPTIONS)
        return f"no {nodes} can provide all of {needs}; its nodes have {kinds}"
    for said, causes, kind in REFUSALS:
        asked = [f"--{name} {job.options[name]}" for name in causes if name in job.options]
        if said in message and asked:
            valid = f"the {kind} of this cluster are {', '.join(cluster.names(kind)) or 'none'}"
            return f"sbatch refuses {' '.join(asked)}: {message}; {valid}"
    return f"sbatch refuses the job: {message}"


def _megabytes(text: str) -> float:
    """Convert memory as sbatch reads it, `64G`. 0 asks for all memory, so it cannot be too much."""
    number, unit = re.findall(r"(\d+)([KMGT]?)", text.upper())[0]
    return int(number) * MEGABYTES[unit]
