"""Meshes of ranks as text, such as `replicate=2,shard=4`, and the mesh of each strategy. No torch.

A mesh is a grid of ranks with named dimensions; the product of their degrees is the world size.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from rollcall.messages.text import did_you_mean

# From the outermost to the innermost: neighboring ranks, which are mostly on one node, share the
# dimension that communicates most.
DIMENSIONS = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
REST, NODE = "rest", "node"


class Preset(NamedTuple):
    """A strategy."""

    mesh: str  # its text
    # ZeRO stage (https://arxiv.org/abs/1910.02054): a shard dimension divides the optimizer state
    # (1), also gradients (2), also weights (3).
    stage: int = 3
    schedule: str = "1f1b"  # of pipeline stages, unless parallel.schedule is set
    # `package.module:attribute` of a `Part` (config, world, mesh) that replaces DDP or FSDP; the
    # second is for a world of one rank with several GPUs.
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
    """Read `name=degree,…` into degrees by name, the outermost first, or raise ValueError.

    A degree is a number, `node` (the ranks per node) or `rest` (the world size divided by the other
    degrees).
    """
    degrees: dict[str, int | str] = {}
    for part in text.split(",") if text else []:
        name, _, degree = (word.strip() for word in part.partition("="))
        if name not in DIMENSIONS:
            choices = f"; write name=degree, such as tensor=4, with {', '.join(DIMENSIONS)}"
            hint = did_you_mean(name, DIMENSIONS) or choices
            raise ValueError(f"unknown dimension '{name}'{hint}")
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
    """Return a mesh's degrees, the outermost first; raise ValueError if the ranks do not fit."""
    named = {name: node_size if value == NODE else value for name, value in parse(text).items()}
    known = {name: degree for name, degree in named.items() if isinstance(degree, int)}
    fixed = math.prod(known.values())
    degrees = {name: known.get(name, world_size // fixed) for name in named}
    if math.prod(degrees.values()) == world_size:
        return degrees
    count = "1 rank" if fixed == 1 else f"{fixed} ranks"
    raise ValueError(
        f"needs {'a multiple of ' if REST in named.values() else ''}{count}, but got {world_size}; "
        f"start that number, choose a mesh of {world_size}, or parallel.strategy=ddp, which works "
        "on any number of ranks"
    )


def show(degrees: Mapping[str, int]) -> str:
    """Return the text of a mesh."""
    return ",".join(f"{name}={degree}" for name, degree in degrees.items())
