"""The variables of each framework beyond torchrun's: an entry for each, or a file."""

import ast
import json
from collections.abc import Sequence
from pathlib import Path

from rollcall.installation import USER_PROGRAM
from rollcall.launch.frameworks import jax, mpi
from rollcall.launch.frameworks.framework import Framework, Place


def _of_deepspeed(place: Place) -> dict[str, int]:
    """Return what DeepSpeed's own launcher sets in addition to torchrun's variables."""
    sizes = {"CROSS_SIZE": place.nodes, "LOCAL_SIZE": place.local_world_size}
    return {"CROSS_RANK": place.node, **sizes}


def _of_tensorflow(place: Place) -> dict[str, str]:
    """Return TF_CONFIG, by which MultiWorkerMirroredStrategy finds the other workers."""
    cluster = {"worker": list(place.addresses())}
    task = {"type": "worker", "index": place.rank}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


TORCH = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers"})
TABLE: dict[str, Framework] = {
    "torch": Framework(TORCH, lambda _: {}, meets_at_master=True),
    "deepspeed": Framework(frozenset({"deepspeed"}), _of_deepspeed, meets_at_master=True),
    "jax": jax.FRAMEWORK,
    "tensorflow": Framework(frozenset({"tensorflow", "keras"}), _of_tensorflow),
    "mpi": mpi.FRAMEWORK,
}
"""Every framework by the name that `--framework` has for it."""


def guess(program: Sequence[str]) -> str:
    """Return the framework of a rank's words, by what the file imports; else `torch`."""
    directory = "."
    if tuple(program[:2]) == USER_PROGRAM:
        directory, program = program[2], program[3:]
    path = Path(directory, program[0])
    if program[0] == "-m":
        path = Path(directory, *program[1].split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the rank says what is wrong with it
        return "torch"
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    named = [name for name, framework in TABLE.items() if found & framework.imports]
    # A script that imports torch as well meets through torch, unless DeepSpeed or MPI does that.
    decided = [name for name in named if name in ("deepspeed", "mpi")] or named
    return decided[0] if decided else "torch"
