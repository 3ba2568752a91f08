"""Meshes of ranks as text, such as `replicate=2,shard=4`, and the mesh of each strategy. No torch.

A mesh is a grid of ranks with named dimensions; the product of their degrees is the world size.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from rollcall.text import did_you_mean

# From the outermost to the innermost: neighboring ranks, which are mostly on one node, share the
# dimension that communicates most.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
REST, NODE = "rest", "node"


class Preset(NamedTuple):
    """A strategy."""

    mesh: str  # its text
    # Of ZeRO (https://arxiv.org/abs/1910.02054), what a shard dimension divides: 1 optimizer state,
    # 2 also gradients, 3 also weights.
    stage: int = 3
    schedule: str = "1f1b"  # of pipeline stages, unless parallel.schedule is set
    # `package.module:attribute` of a `Part`, made of (config, world, mesh), that replaces DDP or
    # FSDP; the second for a world of one rank, over the GPUs of its process.
    part: str = ""
    single_process_part: str = ""


PRESETS = {
    "single": Preset(""),
    "dp": Preset("", single_process_part="rollcall.train.parallel.devices:ReplicaPerGpu"),
    "ddp": Preset("replicate=rest"),
    "zero1": Preset("shard=rest", stage=1),
    "zero2": Preset("shard=rest", stage=2),
    "zero3": Preset("shard=rest"),
    "hsdp": Preset("replicate=rest,shard=node"),
    "tensor": Preset("tensor=rest"),
    "context": Preset("context=rest"),
    "pipeline": Preset("pipeline=rest"),
    "split": Preset(
        "pipeline=rest",
        schedule="sequential",
        single_process_part="rollcall.train.parallel.devices:LayersPerGpu",
    ),
}


def parse(text: str) -> dict[str, int | str]:
    """Read `name=degree,…` into degrees by name, the outermost dimension first.

    Args:
        text: a degree is a number, `node` (the ranks per node) or `rest` (what the other degrees
            leave of the world size).

    Raises:
        ValueError: an unknown dimension or degree, or a dimension given twice.
    """
    degrees: dict[str, int | str] = {}
    for part in text.split(",") if text else []:
        name, _, degree = (word.strip() for word in part.partition("="))
        if name not in DIMENSIONS:
            choices = f"; choose from {', '.join(DIMENSIONS)}"
            raise ValueError(
                f"unknown dimension '{name}'{did_you_mean(name, DIMENSIONS) or choices}"
            )
        if name in degrees:
            raise ValueError(f"'{name}' is given twice")
        if degree not in (REST, NODE) and not (degree.isascii() and degree.isdigit()):
            raise ValueError(f"{name}: expected a number, {NODE} or {REST}, got '{degree}'")
        degrees[name] = degree if degree in (REST, NODE) else int(degree)
        if degrees[name] == 0:
            raise ValueError(f"{name}: expected at least 1, got 0")
    if list(degrees.values()).count(REST) > 1:
        raise ValueError(f"only one dimension can have the degree '{REST}'")
    return {name: degrees[name] for name in DIMENSIONS if name in degrees}


def fit(text: str, world_size: int, node_size: int) -> dict[str, int]:
    """Return the degrees of a mesh for a number of ranks, the outermost dimension first.

    Raises:
        ValueError: the degrees do not multiply to the world size.
    """
    asked = parse(text)
    known = {name: node_size if degree == NODE else degree for name, degree in asked.items()}
    wanted = {name: degree for name, degree in known.items() if isinstance(degree, int)}
    fixed = math.prod(wanted.values())
    degrees = {name: wanted.get(name, world_size // fixed) for name in known}
    if math.prod(degrees.values()) == world_size:
        return degrees
    needs = "a multiple of " if REST in asked.values() else ""
    raise ValueError(
        f"needs {needs}{fixed} rank{'s' * (fixed != 1)}, but {world_size} were started; choose "
        f"a mesh of {world_size}, or parallel.strategy=ddp, which works on any number of ranks"
    )


def show(degrees: Mapping[str, int]) -> str:
    """Return the text of a mesh."""
    return ",".join(f"{name}={degree}" for name, degree in degrees.items())
