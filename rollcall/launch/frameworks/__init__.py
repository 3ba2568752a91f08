"""The variables of each framework beyond torchrun's: an entry for each, or a file."""

import ast
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rollcall.cli.installation import USER_PROGRAM
from rollcall.launch.frameworks import mpi
from rollcall.launch.frameworks.framework import Framework, RankContext
from rollcall.system import hosts


def _of_deepspeed(context: RankContext) -> dict[str, int]:
    """Return the variables that DeepSpeed's launcher sets in addition to torchrun's."""
    sizes = {"CROSS_SIZE": context.nodes, "LOCAL_SIZE": context.local_world_size}
    return {"CROSS_RANK": context.node, **sizes}


def _of_tensorflow(context: RankContext) -> dict[str, str]:
    """Return TF_CONFIG, by which TensorFlow's strategies find the other ranks."""
    roles = context.roles or ["worker"] * context.world_size
    role, cluster = roles[context.rank], dict[str, list[str]]()
    for other, address in zip(roles, context.addresses(), strict=True):
        if other != "evaluator" or role == "evaluator":  # a coordinator connects to all it sees
            cluster.setdefault(other, []).append(address)
    task = {"type": role, "index": roles[: context.rank].count(role)}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def _of_jax(context: RankContext) -> dict[str, object]:
    """Return the variables with which `jax.distributed.initialize()` needs no arguments.

    JAX reads the coordinator from its own variable, but the id and the number of processes only
    from a launcher that it knows. It detects Open MPI by these variables
    (jax/_src/clusters/ompi_cluster.py, 0.4 to 0.10); the URI itself is not used if the coordinator
    is given.
    """
    coordinator = context.addresses()[0]
    is_first = context.local_rank == 0 and context.nodes > 1
    if is_first and not coordinator.startswith(("127.", "[::1]")):
        try:  # on CPUs, JAX listens on the address of this name
            hosts.route(socket.gethostname())
        except hosts.HostError as error:
            print(f"rollcall: {error}. On CPUs, JAX cannot connect its processes", file=sys.stderr)
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": context.world_size,
        "JAX_PROCESS_ID": context.rank,
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{coordinator}",
        "OMPI_COMM_WORLD_SIZE": context.world_size,
        "OMPI_COMM_WORLD_RANK": context.rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": context.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": context.local_world_size,
    }


def _of_ray(_: RankContext) -> dict[str, bool]:
    """Let torch in Ray's workers, which inherit this, open a store of its own."""
    return {"TORCHELASTIC_USE_AGENT_STORE": False}


TORCH = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers"})
TABLE: dict[str, Framework] = {
    "torch": Framework(TORCH, lambda _: {}, meets_at_master=True),
    "deepspeed": Framework(frozenset({"deepspeed"}), _of_deepspeed, meets_at_master=True),
    "jax": Framework(frozenset({"jax", "flax", "optax", "equinox"}), _of_jax),
    "tensorflow": Framework(frozenset({"tensorflow", "keras"}), _of_tensorflow),
    "mpi": mpi.FRAMEWORK,
    "ray": Framework(frozenset({"ray.train"}), _of_ray),
}
"""All frameworks by their names for `--framework`."""


def guess(program: Sequence[str]) -> str:
    """Return the framework that a rank's command line, after `python`, imports; else `torch`."""
    directory = "."
    if tuple(program[:2]) == USER_PROGRAM:
        directory, program = program[2], program[3:]
    path = Path(directory, program[0])
    if program[0] == "-m":
        path = Path(directory, *program[1].split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the rank will report the problem
        return "torch"
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    packages = {".".join(name.split(".")[:length]) for name in modules for length in (1, 2)}
    names = [name for name, framework in TABLE.items() if packages & framework.imports]
    # A script that also imports torch meets through torch, unless one of these does that.
    others = ("deepspeed", "mpi", "ray")
    return next((name for name in names if name in others), [*names, "torch"][0])
