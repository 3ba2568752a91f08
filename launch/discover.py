"""What is this cluster like? `submit.py --discover` writes a first profile of it."""

from __future__ import annotations

from launch import cluster, slurm
from launch.profile import users_folder
from launch.slurm import SlurmError

PROFILE = """\
# The cluster {name}, as sinfo and scontrol describe it. Yours to edit: submit.py --cluster {name}
#
{table}
#
# The largest index of an array is {index}.
options:            # as on the command line, without the dashes
  partition: {partition}
# account:
# gpus-per-node:
# root:             # where runs are kept: a file system that all nodes see
modules: []         # names for `module load`
environment: {{}}     # variables for every job
setup: []           # further shell lines for the job script
"""


def main(name: str | None) -> int:
    """Write the profile; return the exit code.

    Args:
        name: of the cluster; None takes Slurm's.

    Raises:
        SlurmError: there is no Slurm here, or there is a profile already.
    """
    if not slurm.is_available():
        raise SlurmError("--discover: there is no sbatch here; run it on the cluster's login node")
    partitions = cluster.partitions()
    name = name or cluster.configuration("ClusterName") or "cluster"
    path = users_folder() / f"{name}.yaml"
    text = describe(name, partitions)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise SlurmError(f"--discover: {path} is there already; edit it or remove it") from None
    print(f"written: {path}\nuse it:  submit.py --cluster {name} ...")
    return 0


def describe(name: str, partitions: dict[str, cluster.Partition]) -> str:
    """The profile's text: what is there as a comment, and the default partition as an option."""
    size = int(cluster.configuration("MaxArraySize") or 1001)
    default = next((entry.name for entry in partitions.values() if entry.is_default), None)
    rows = [("partition", "nodes", "limit", "a node has")]
    for entry in partitions.values():
        star = "*" if entry.is_default else ""
        kinds = "; or ".join(entry.kinds)
        rows.append((f"{entry.name}{star}", str(entry.nodes), entry.limit_text, kinds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(f"# {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows)
    return PROFILE.format(
        name=name, table=table, index=size - 1, partition=default or next(iter(partitions), "")
    )
