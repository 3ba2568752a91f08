"""What is there on the cluster, and what may a job have of it?"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from launch import slurm
from launch.slurm import SlurmError
from train import hosts

if TYPE_CHECKING:
    from pathlib import Path


class Partition(NamedTuple):
    """A partition and what it allows.

    Attributes:
        nodes: hosts in it.
        largest_job: hosts that one job may have.
        limit: longest time of a job, in seconds.
        limit_text: the same, as Slurm writes it.
        cpus, megabytes, gpus: what its largest nodes have.
        kinds: its different nodes, in words.
    """

    name: str
    is_default: bool
    nodes: int
    largest_job: float
    limit: float
    limit_text: str
    cpus: int
    megabytes: int
    gpus: int
    kinds: tuple[str, ...]


def partitions() -> dict[str, Partition]:
    """All partitions that take jobs, by name.

    Raises:
        SlurmError: sinfo does not answer.
    """
    found: dict[str, Partition] = {}
    # --exact: otherwise nodes of different kinds share a line, which tells the smallest ("8+").
    listed = slurm.ask("sinfo", "-h", "--exact", "-o", "%P|%D|%s|%l|%a|%c|%m|%G")
    for line in listed.splitlines():
        name, nodes, size, limit, state, cpus, megabytes, gres = line.split("|")
        if state != "up":
            continue
        plain = name.rstrip("*")
        gpus = sum(int(count) for count in re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", gres))
        kind = f"{cpus} CPUs, {megabytes} MB and {gpus or 'no'} GPUs"
        largest = size.rpartition("-")[2]
        entry = Partition(
            plain,
            name.endswith("*"),
            int(nodes),
            slurm.UNLIMITED if largest == "infinite" else int(largest),
            slurm.seconds(limit),
            limit,
            int(cpus),
            int(megabytes),
            gpus,
            (kind,),
        )
        # A partition has a line per kind of node and state they are in; the hosts add up.
        if before := found.get(plain):
            entry = entry._replace(
                nodes=entry.nodes + before.nodes,
                cpus=max(entry.cpus, before.cpus),
                megabytes=max(entry.megabytes, before.megabytes),
                gpus=max(entry.gpus, before.gpus),
                kinds=tuple(dict.fromkeys((*before.kinds, kind))),
            )
        found[plain] = entry
    return found


def test_only(script: str) -> tuple[bool, str]:
    """Whether sbatch would take a script, and what it says about it."""
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
    )
    return answer.returncode == 0, slurm.plain(answer.stderr)


def ask_for_nodes(script: Path, nodes: int) -> subprocess.Popen[bytes]:
    """Ask when a job like this one would start on so many nodes, without waiting for the answer.

    Raises:
        SlurmError: there is no sbatch.
    """
    command = ["sbatch", "--test-only", f"--nodes={nodes}", str(script)]
    return slurm.in_background(command, stderr=subprocess.PIPE)


def expected_start(answer: str) -> float | None:
    """When sbatch --test-only says that a job would start, in seconds since 1970."""
    match = re.search(r"to start at (\S+)", answer)
    return time.mktime(time.strptime(match[1], slurm.TIMESTAMP)) if match else None


def preempting_partition(job_id: str) -> str | None:
    """A partition of a higher tier that has all nodes of a job's own; None if there is none.

    Raises:
        SlurmError: Slurm does not answer.
    """
    own = slurm.ask("squeue", "-h", "-j", job_id, "-o", "%P").strip()
    listed = slurm.ask("scontrol", "-o", "show", "partition").splitlines()
    found = {}
    for line in listed:
        fields = dict(item.split("=", 1) for item in line.split() if "=" in item)
        found[fields["PartitionName"]] = (int(fields["PriorityTier"]), fields["Nodes"])
    tier, nodes = found[own]
    return next((name for name in found if found[name][0] > tier and found[name][1] == nodes), None)


def names(kind: Literal["nodes", "features", "reservations"]) -> list[str]:
    """What there is of a kind that a job can name.

    Raises:
        SlurmError: Slurm does not answer.
    """
    if kind == "reservations":
        shown = slurm.ask("scontrol", "-o", "show", "reservation")
        return re.findall(r"ReservationName=(\S+)", shown)
    listed = slurm.ask("sinfo", "-h", "-N", "-o", "%N" if kind == "nodes" else "%f")
    return sorted({name for name in re.split(r"[,\s]+", listed) if name not in ("", "(null)")})


def configuration(name: str) -> str | None:
    """A value of slurm.conf, such as MaxArraySize; None if Slurm does not tell.

    Raises:
        SlurmError: scontrol does not answer.
    """
    shown = re.search(rf"^{name}\s*= (.*)$", slurm.ask("scontrol", "show", "config"), re.MULTILINE)
    return shown[1].strip() if shown else None


def without(job_id: str, bad: Sequence[str], nodes: int) -> list[str]:
    """All hosts that a job leaves out when it leaves out these, too.

    Empty if it would not find so many others like them: then it would wait for ever.

    Raises:
        SlurmError: Slurm does not answer.
    """
    fields = slurm.ask("squeue", "-h", "-j", job_id, "-o", "%P|%n|%x|%v").strip().split("|")
    if len(fields) != 4:
        raise SlurmError(f"squeue does not know job {job_id}")
    partition, asked, excluded, reservation = fields
    if asked or reservation != "(null)":
        return []
    listed = slurm.ask("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%c|%m|%G|%f").splitlines()
    kinds = dict(line.split("|", 1) for line in listed)
    out = {*bad, *hosts.expand(excluded)}
    wanted = {kinds.get(host) for host in bad}
    others = sum(kinds[name] in wanted for name in kinds.keys() - out)
    return sorted(out) if others >= nodes else []
