"""Does a job fit the cluster? Asked before it is queued, where it would wait for ever or fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from launch import cluster, slurm
from launch.cluster import Partition
from launch.job import Job
from launch.slurm import SlurmError

MEGABYTES = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}

ON_NODES = ("gres", "constraint", "nodelist", "exclude", "mem-per-cpu")
"""Further options that say which nodes a job can have."""
TOLD: tuple[tuple[str, tuple[str, ...], Literal["nodes", "features", "reservations"]], ...] = (
    ("Invalid node name", ("nodelist", "exclude"), "nodes"),
    ("Invalid feature", ("constraint",), "features"),
    ("reservation is invalid", ("reservation",), "reservations"),
)
"""What sbatch says of which options, and what to list then."""


def check(job: Job, script: str) -> str:
    """Ask whether Slurm would take a job; return when and where it expects to start it.

    Raises:
        SlurmError: it would not; the message names the option and what would be valid.
    """
    known = cluster.partitions()
    chosen = _chosen(job.partition, known)
    nodes = f"{job.nodes} --spares {job.spares}" if job.spares else job.nodes
    asked: list[tuple[str, object, float | None, Callable[[Partition], float]]] = [
        ("nodes", nodes, job.nodes + job.spares, lambda entry: min(entry.nodes, entry.largest_job)),
        # Slurm itself queues such a job for ever (EnforcePartLimits=NO, its default).
        ("time", job.time, slurm.seconds(job.time or "0"), lambda entry: entry.limit),
        ("gpus-per-node", job.gpus_per_node, job.gpus_per_node, lambda entry: entry.gpus),
        ("cpus-per-task", job.cpus_per_task, job.cpus_per_task, lambda entry: entry.cpus),
        ("mem", job.mem, _megabytes(job.mem or "0"), lambda entry: entry.megabytes),
    ]
    for option, text, value, most in asked:
        if value is not None and value > max(most(entry) for entry in chosen):
            raise SlurmError(_too_much(f"--{option} {text}", value, option, chosen, known, most))
    _check_array(job.options.get("array"))
    accepted, message = cluster.test_only(script)
    if accepted:
        start = re.search(r"to start at (\S+) .*on nodes (\S+)", message)
        return f"expected to start at {start[1]} on {start[2]}" if start else message
    raise SlurmError(_refusal(job, message, chosen))


def _refusal(job: Job, message: str, chosen: Sequence[Partition]) -> str:
    """sbatch's refusal in a sentence that names the option and what there is."""
    if "node configuration is not available" in message:
        names = " or ".join(entry.name for entry in chosen)
        kinds = "; or ".join(kind for entry in chosen for kind in entry.kinds)
        count = "node" if job.nodes == 1 else f"{job.nodes} nodes"
        return (
            f"no {count} of partition {names} can give what you ask for together: "
            f"{_per_node(job)}; its nodes have {kinds}"
        )
    for said, given, kind in TOLD:
        asked = [f"--{name} {job.options[name]}" for name in given if name in job.options]
        if said in message and asked:
            there = f"the {kind} here are {', '.join(cluster.names(kind)) or 'none'}"
            return f"sbatch refuses {' '.join(asked)}: {message}; {there}"
    return f"sbatch refuses the job: {message}"


def _chosen(names: str | None, known: dict[str, Partition]) -> list[Partition]:
    """The partitions of which the job can have any."""
    listed = ", ".join(sorted(known))
    if names is None:
        chosen = [entry for entry in known.values() if entry.is_default]
        if not chosen:
            raise SlurmError(
                f"there is no default partition here: add --partition, one of {listed}"
            )
        return chosen
    for name in names.split(","):
        if name not in known:
            raise SlurmError(f"--partition {name}: there is none; those here are {listed}")
    return [known[name] for name in names.split(",")]


def _too_much(
    asked: str,
    value: float,
    option: str,
    chosen: Sequence[Partition],
    known: dict[str, Partition],
    most: Callable[[Partition], float],
) -> str:
    best = max(chosen, key=most)
    limit = {
        "nodes": f"a job in partition {best.name} can have {most(best):.0f} at most",
        "time": f"the limit of partition {best.name} is {best.limit_text}",
        "gpus-per-node": f"no node of partition {best.name} has more than {most(best):.0f} GPUs",
        "cpus-per-task": f"no node of partition {best.name} has more than {most(best):.0f} CPUs",
        "mem": f"no node of partition {best.name} has more than {most(best):.0f} MB",
    }[option]
    # The one that allows it by the least: not the largest machine for every job.
    others = sorted((entry for entry in known.values() if most(entry) >= value), key=most)
    return f"{asked}: {limit}" + (f"; partition {others[0].name} allows it" if others else "")


def _check_array(array: str | None) -> None:
    """Refuse an index that this Slurm cannot have; what it cannot read at all, sbatch refuses."""
    if array is None:
        return
    indices = [int(number) for number in re.findall(r"\d+", re.sub(r"[:%]\d+", "", array))]
    size = int(cluster.configuration("MaxArraySize") or 1001)
    if indices and max(indices) >= size:
        raise SlurmError(
            f"--array {array}: the largest index here is {size - 1} (MaxArraySize={size})"
        )


def _megabytes(text: str) -> float:
    """Memory as sbatch reads it, `64G`; 0, which asks for all of a node, is no limit."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        raise SlurmError(f"--mem {text}: a number with K, M (the default), G or T is expected")
    return int(match[1]) * MEGABYTES[match[2]]


def _per_node(job: Job) -> str:
    asked: dict[str, object] = {
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
    }
    asked |= {name: job.options[name] for name in ON_NODES if name in job.options}
    return ", ".join(f"--{option} {value}" for option, value in asked.items() if value)
