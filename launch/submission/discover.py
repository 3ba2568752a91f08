"""`rollcall submit --discover`: write a first profile of this cluster."""

from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.launch.submission.profile import users_folder
from rollcall.text import table

PROFILE = """\
# The cluster {name}, as sinfo and scontrol describe it. Edit it, and use it with
# rollcall submit --cluster {name}
#
{table}
#
# The largest index of an array is {index}.
options:            # the options of rollcall submit, without the dashes
  partition: {partition}
{account}
{gpus}
# root:             # directory of the runs, on a file system that all nodes share
modules: []         # names for `module load`
environment: {{}}     # environment variables of every job
setup: []           # further shell lines of the job script
"""


def main(name: str | None, prints: bool = False) -> int:
    """Write or print a cluster's profile (default: Slurm's ClusterName); return the exit code.

    Raises:
        SlurmError: this machine has no Slurm, or the profile exists.
    """
    if not slurm.is_available():
        raise SlurmError("--discover: this machine has no sbatch; run it on a login node")
    partitions = cluster.partitions()
    name = name or cluster.configuration("ClusterName") or "cluster"
    path = users_folder() / f"{name}.yaml"
    text = describe(name, partitions)
    if prints:
        print(text, end="")
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise SlurmError(f"--discover: {path} exists; edit it or remove it") from None
    print(f"written: {path}\nuse it:  rollcall submit --cluster {name} ...")
    return 0


def describe(name: str, partitions: dict[str, cluster.Partition]) -> str:
    """Return the text of a profile: partitions as a comment, the default partition as an option."""
    size = int(cluster.configuration("MaxArraySize") or 1001)
    default = next((entry.name for entry in partitions.values() if entry.is_default), None)
    rows = [("partition", "nodes", "limit", "a node has")]
    for entry in partitions.values():
        star = "*" if entry.is_default else ""
        kinds = "; or ".join(entry.kinds)
        rows.append((f"{entry.name}{star}", str(entry.nodes), entry.limit_text, kinds))
    partition = default or next(iter(partitions), "")
    accounts = cluster.accounts()
    # With one account, Slurm uses it anyway.
    account = f"# account: {accounts[0] if accounts else ''}"
    account += f"   # yours are {', '.join(accounts)}" if len(accounts) > 1 else ""
    shapes = [shape for entry in partitions.values() for shape in entry.shapes]
    types = ", ".join(sorted({f"{kind}:N" for _, by_type in shapes for kind in by_type if kind}))
    gpus = f"# gpus-per-node:{f'   # by type: {types}' if types else ''}"
    lines = "\n".join(f"# {line}" for line in table(rows))
    filled = {"name": name, "table": lines, "index": size - 1, "partition": partition}
    return PROFILE.format(**filled, account=account, gpus=gpus)
