"""The cluster's partitions and nodes, and what a job may request.

Every function that asks Slurm raises SlurmError if Slurm does not answer.
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollcall.launch.scheduler import gpus, slurm
from rollcall.system import hosts


@dataclass
class Partition:
    """A partition and its limits."""

    name: str
    is_default: bool
    largest_job: float  # how many hosts one job may have
    limit: float  # time limit of a job, in seconds
    limit_text: str  # the same, as Slurm writes it
    nodes: int = 0  # how many hosts it has
    cpus: int = 0  # of its largest nodes, like megabytes and gpus
    megabytes: int = 0
    gpus: int = 0
    kinds: list[str] = field(default_factory=list)  # descriptions of its kinds of nodes
    # Of each kind, the CPUs and GPUs for jobs.
    shapes: list[tuple[int, Mapping[str, int]]] = field(default_factory=list)


def partitions(named: str | None = None) -> dict[str, Partition]:
    """Return all partitions that are up, by name, and those in `named`, even if hidden or down."""
    found = _partitions()
    if named and not found.keys() >= {*named.split(",")}:
        found |= _partitions(f"--partition={named}")
    return found


def _partitions(*named: str) -> dict[str, Partition]:
    found: dict[str, Partition] = {}
    # --exact: otherwise different kinds of nodes share a line with the smallest values ("8+").
    # --noconvert: otherwise a limit of 1024 nodes is "1K".
    words = ("--noconvert", "-h", "--exact", "-o", "%P|%D|%s|%l|%a|%c|%m|%G|%B", *named)
    for line in slurm.ask("sinfo", *words).splitlines():
        name, nodes, size, limit, state, cpus, megabytes, gres, most_cpus = line.split("|")
        if state != "up" and not named:
            continue
        plain, most = name.rstrip("*"), size.rpartition("-")[2]
        largest = slurm.UNLIMITED if most == "infinite" else int(most)
        new = Partition(plain, name != plain, largest, slurm.seconds(limit), limit)
        # A partition has one line per kind and state of nodes; add up their hosts.
        entry = found.setdefault(plain, new)
        by_type = gpus.of_resources(gres)
        count = sum(by_type.values())
        entry.nodes += int(nodes)
        entry.cpus = max(entry.cpus, int(cpus))
        entry.megabytes = max(entry.megabytes, int(megabytes))
        entry.gpus = max(entry.gpus, count)
        kind = f"{cpus} CPUs, {megabytes} MB and {count or 'no'} GPUs"
        entry.kinds += [kind] if kind not in entry.kinds else []
        usable = min(int(cpus), int(most_cpus)) if most_cpus.isdecimal() else int(cpus)
        entry.shapes.append((usable, by_type))
    return found


def share_of_cpus(asked: Mapping[str, int], partition: str | None) -> int | None:
    """Return the fewest CPUs that go with these GPUs on a node that fits; None if unknown."""
    try:
        known = partitions(partition)
    except slurm.SlurmError:
        return None
    names = partition.split(",") if partition else [n for n in known if known[n].is_default]
    shares = []
    for cpus, there in (shape for name in names if name in known for shape in known[name].shapes):
        of_type = {kind: there.get(kind, 0) if kind else sum(there.values()) for kind in asked}
        if all(of_type[kind] >= asked[kind] for kind in asked):
            shares.append(cpus * sum(asked.values()) // sum(there.values()))
    return max(1, min(shares)) if shares else None


def test_only(script: str) -> tuple[bool, str]:
    """Return whether sbatch would accept a script, and its message."""
    command = ["sbatch", "--test-only"]
    answer = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    return answer.returncode == 0, slurm.plain(answer.stderr)


def answering(partition: str) -> tuple[int, int]:
    """Return how many nodes of some partitions have registered with the controller, and all."""
    shown = slurm.ask("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T").splitlines()
    states = dict(line.split("|") for line in shown)
    return sum(not state.startswith("unk") for state in states.values()), len(states)


def ask_for_nodes(script: Path, nodes: int) -> subprocess.Popen[bytes]:
    """Ask when a job like this would start on a number of nodes, without waiting for the answer."""
    command = ["sbatch", "--test-only", f"--nodes={nodes}", str(script)]
    return slurm.in_background(command, stderr=subprocess.PIPE)


def expected_start(answer: str) -> float | None:
    """Return when a job would start according to sbatch --test-only, in seconds since 1970."""
    match = re.search(r"to start at (\S+)", answer)
    return time.mktime(time.strptime(match[1], slurm.TIMESTAMP)) if match else None


def preempting_partition(job_id: str) -> str | None:
    """Return a partition of a higher tier with the same nodes as the job's own, or None."""
    own = slurm.ask("squeue", "-h", "-j", job_id, "-o", "%P").split()[:1]  # of its first group
    listed = slurm.ask("scontrol", "-o", "show", "partition").splitlines()
    found = {}
    for line in listed:
        fields = dict(item.split("=", 1) for item in line.split() if "=" in item)
        found[fields["PartitionName"]] = (int(fields["PriorityTier"]), fields["Nodes"])
    if not own or own[0] not in found:
        raise slurm.SlurmError(f"job {job_id} has no partition: it is no longer running")
    tier, nodes = found[own[0]]
    return next((name for name in found if found[name][0] > tier and found[name][1] == nodes), None)


def version() -> tuple[int, int] | None:
    """Return this cluster's version of Slurm, such as (23, 2); None if Slurm does not say."""
    with contextlib.suppress(slurm.SlurmError):
        if number := re.search(r"\b(\d+)\.(\d+)", slurm.ask("sinfo", "--version")):
            return int(number[1]), int(number[2])
    return None


def options_of_site() -> dict[str, bool]:
    """Return the options of this site's sbatch, its plugins' too, and whether they take a value."""
    with contextlib.suppress(slurm.SlurmError):
        shown = slurm.ask("sbatch", "--help")
        names = re.findall(r"^\s*(?:-\w,\s*)?--([a-z][\w-]*)(=?)", shown, re.MULTILINE)
        return {name: bool(value) for name, value in names}
    return {}


def names(
    kind: Literal["nodes", "features", "reservations"], partition: str | None = None
) -> list[str]:
    """List the nodes (of a partition), features or reservations that a job can request by name."""
    if kind == "reservations":
        shown = slurm.ask("scontrol", "-o", "show", "reservation")
        return re.findall(r"ReservationName=(\S+)", shown)
    place = ["-p", partition] if partition else []
    listed = slurm.ask("sinfo", "-h", "-N", *place, "-o", "%N" if kind == "nodes" else "%f")
    return sorted({name for name in re.split(r"[,\s]+", listed) if name not in ("", "(null)")})


def configuration(name: str) -> str | None:
    """Return a value of slurm.conf, such as MaxArraySize; None if Slurm does not show it."""
    shown = re.search(rf"^{name}\s*= (.*)$", slurm.ask("scontrol", "show", "config"), re.MULTILINE)
    return shown[1].strip() if shown else None


def without(job_id: str, bad: Sequence[str], nodes: int) -> list[str]:
    """Return all hosts to exclude with these; none if the job would then wait forever."""
    asked_for = slurm.ask("squeue", "-h", "-j", job_id, "-o", "%P|%n|%x|%v")
    fields = asked_for.strip().partition("\n")[0].split("|")  # of the first group of a job
    if len(fields) != 4:
        raise slurm.SlurmError(f"squeue does not know job {job_id}")
    partition, asked, excluded, reservation = fields
    if asked or reservation != "(null)":
        return []
    listed = slurm.ask("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%c|%m|%G|%f").splitlines()
    kinds = dict(line.split("|", 1) for line in listed)
    out = {*bad, *hosts.expand(excluded)}
    wanted = {kinds.get(host) for host in bad}
    others = sum(kinds[name] in wanted for name in kinds.keys() - out)
    return sorted(out) if others >= nodes else []
