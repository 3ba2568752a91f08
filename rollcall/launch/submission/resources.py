"""GPUs and CPUs on each node of a job, from all the ways to ask sbatch for them."""

import re
from argparse import Namespace
from collections.abc import Mapping

from rollcall.launch.scheduler import cluster, gpus, slurm
from rollcall.launch.scheduler.job import RANKS_WITHOUT_GPU
from rollcall.launch.submission.options import CommandLine
from rollcall.messages.refusal import RefusedError
from rollcall.system import hosts


def ranks_of_nodes(line: CommandLine) -> tuple[int, ...]:
    """Return the ranks of each node of all groups; raise RefusedError if they do not fit."""
    found: list[int] = []
    for group in line.groups or (line,):
        text, nodes = group.own.nproc_per_node, group.own.nodes
        try:
            if text and "," in text and (nodes[0] < nodes[1] or group.own.spares):
                raise ValueError("nodes that come and go have equal numbers of ranks")
            found += hosts.ranks_of_nodes(text or str(_count(group) or RANKS_WITHOUT_GPU), nodes[1])
        except ValueError as error:
            raise RefusedError(f"--nproc-per-node: {error}") from None
    return tuple(found)


def says_ranks(line: CommandLine) -> bool:
    """Return True if every group names its ranks or GPUs; otherwise nodes count their GPUs."""
    return all(group.own.nproc_per_node or _count(group) for group in line.groups or (line,))


def spread(line: CommandLine) -> CommandLine:
    """Return a command line that asks for GPUs per node, because all nodes start equal ranks."""
    groups = tuple(map(spread, line.groups))  # the line itself is the first of them, without more
    own, passed, origins = line.own, dict(line.passed), dict(line.origins)
    found = {"gpus-per-node": own.gpus_per_node} if own.gpus_per_node else {}
    for name in ("gpus", "gpus-per-task"):  # there is one task per node
        if text := passed.pop(name, None):
            found[name] = _per_node(name, text, own)
            origins["gpus-per-node"] = f"--{name} {text}, {origins.get(name, 'given')}"
    if len(set(found.values())) > 1:
        raise RefusedError(f"{' and '.join(f'--{name}' for name in found)}: give only one of them")
    text = next(iter(found.values()), None)
    if text and gpus.per_node(None, passed):
        raise RefusedError("--gres and another option both ask for GPUs: give only one of them")
    given = Namespace(**{**vars(own), "gpus_per_node": text})
    return line._replace(own=given, passed=passed, origins=origins, groups=groups)


def cpus_per_node(line: CommandLine) -> tuple[int, str]:
    """Return the CPUs on each node, and where the number comes from."""
    own, passed = line.own, line.passed
    if own.cpus_per_task and passed.get("cpus-per-gpu"):
        raise RefusedError("--cpus-per-task and --cpus-per-gpu: give only one of them")
    if own.cpus_per_task:
        return own.cpus_per_task, line.origins.get("cpus-per-task", "")
    if per_gpu := passed.get("cpus-per-gpu"):
        if not per_gpu.isdecimal() or not _count(line):
            raise RefusedError(f"--cpus-per-gpu {per_gpu}: expected a number, and GPUs to go with")
        return int(per_gpu) * _count(line), f"--cpus-per-gpu {per_gpu}"
    asked = gpus.per_node(own.gpus_per_node, passed)
    if asked and not own.local and slurm.is_available():
        share = cluster.share_of_cpus(asked, own.partition)
        if share is not None:
            return share, "the CPUs of a node that go with these GPUs"
    return max(ranks_of_nodes(line._replace(groups=()))), "one per rank"


def in_allocation(line: CommandLine, env: Mapping[str, str]) -> CommandLine:
    """Return a command line that asks for what an allocation has, where it says nothing else."""
    if "SLURM_JOB_ID" not in env:
        raise RefusedError("--in-allocation: SLURM_JOB_ID is not set; start a shell with salloc")
    there = int(env.get("SLURM_JOB_NUM_NODES", 1))
    given = vars(line.own).copy()
    if "nodes" not in line.origins:
        given["nodes"] = (there, there)
    if given["nodes"][1] > there:
        asked = given["nodes"][1]
        raise RefusedError(f"--nodes {asked}: the allocation {env['SLURM_JOB_ID']} has {there}")
    if not given["cpus_per_task"]:
        cpus = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_JOB_CPUS_PER_NODE", ""))
        given["cpus_per_task"] = min(map(int, cpus), default=None)
    return line._replace(own=Namespace(**given))


def _count(line: CommandLine) -> int:
    return sum(gpus.per_node(line.own.gpus_per_node, line.passed).values())


def _per_node(name: str, text: str, own: Namespace) -> str:
    try:
        counts = gpus.of_option(text)
    except ValueError as error:
        raise RefusedError(f"--{name}: {error}") from None
    if name == "gpus-per-task":
        return text
    least, nodes = own.nodes
    if least < nodes or any(count % nodes for count in counts.values()):
        raise RefusedError(f"--gpus {text}: nodes need equal numbers of GPUs; use --gpus-per-node")
    shares = {kind: count // nodes for kind, count in counts.items()}
    return ",".join(f"{kind}:{count}" if kind else str(count) for kind, count in shares.items())
