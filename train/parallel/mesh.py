"""Which mesh do the ranks form? `replicate=2,shard=4` as text, presets, and what fits. No torch.

A mesh is a grid of ranks with a name and a degree for each dimension; world_size is the product of
the degrees.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# From the outermost to the innermost: neighbouring ranks, on one node as far as it reaches, share
# the dimension that communicates most.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
REST, NODE = "rest", "node"


class Preset(NamedTuple):
    """A strategy by its usual name.

    Attributes:
        mesh: the text of its mesh.
        stage: of ZeRO (https://arxiv.org/abs/1910.02054), what a shard dimension divides:
            1 optimizer state, 2 gradients too, 3 weights too.
        schedule: of a pipeline, unless parallel.schedule says another.
        part: `package.module:attribute` of what spreads the model over replicate and shard in place
            of DDP or FSDP: a `Part`, made of (config, world, mesh).
        alone: the same for the GPUs of a process that is the only one.
    """

    mesh: str
    stage: int = 3
    schedule: str = "1f1b"
    part: str = ""
    alone: str = ""


PRESETS = {
    "single": Preset(""),
    "dp": Preset("", alone="train.parallel.devices:Threads"),
    "ddp": Preset("replicate=rest"),
    "zero1": Preset("shard=rest", stage=1),
    "zero2": Preset("shard=rest", stage=2),
    "zero3": Preset("shard=rest"),
    "hsdp": Preset("replicate=rest,shard=node"),
    "tensor": Preset("tensor=rest"),
    "context": Preset("context=rest"),
    "pipeline": Preset("pipeline=rest"),
    "split": Preset("pipeline=rest", schedule="sequential", alone="train.parallel.devices:Layers"),
}


def parse(text: str) -> dict[str, int | str]:
    """Read `name=degree,…` into degrees by name, the outermost dimension first.

    Args:
        text: a degree is a number, `node` (as many as a node has ranks) or `rest` (what the other
            dimensions leave of the world size).

    Raises:
        ValueError: a name or a degree that does not exist, or one given twice.
    """
    degrees: dict[str, int | str] = {}
    for part in text.split(",") if text else []:
        name, _, degree = (word.strip() for word in part.partition("="))
        if name not in DIMENSIONS:
            match = difflib.get_close_matches(name, DIMENSIONS, 1)
            hint = f"did you mean '{match[0]}'? " if match else ""
            raise ValueError(
                f"there is no dimension '{name}'; {hint}they are {', '.join(DIMENSIONS)}"
            )
        if name in degrees:
            raise ValueError(f"'{name}' is given twice")
        if degree not in (REST, NODE) and not (degree.isascii() and degree.isdigit()):
            raise ValueError(f"{name}={degree}: expected a number, '{NODE}' or '{REST}'")
        degrees[name] = degree if degree in (REST, NODE) else int(degree)
        if degrees[name] == 0:
            raise ValueError(f"{name}=0: a degree is at least 1")
    if list(degrees.values()).count(REST) > 1:
        raise ValueError(f"only one dimension can take the '{REST}'")
    return {name: degrees[name] for name in DIMENSIONS if name in degrees}


def fit(text: str, world_size: int, node_size: int) -> dict[str, int]:
    """The degrees of a mesh for this many ranks, the outermost dimension first.

    Args:
        text: as `parse` reads it.
        world_size: ranks there are.
        node_size: ranks of one node.

    Raises:
        ValueError: the degrees do not multiply to the world size; names the nearest that do.
    """
    asked = parse(text)
    known = {name: node_size if degree == NODE else degree for name, degree in asked.items()}
    wanted = {name: degree for name, degree in known.items() if isinstance(degree, int)}
    fixed = math.prod(wanted.values())
    degrees = {name: wanted.get(name, world_size // fixed) for name in known}
    if math.prod(degrees.values()) == world_size:
        return degrees
    needs = "a multiple of " if REST in asked.values() else ""
    started = f"{fixed} rank{'s' * (fixed != 1)}, but {world_size} were started"
    nearest = min(
        _factorizations(list(degrees), world_size),
        key=lambda other: sum(abs(math.log(other[name] / wanted[name])) for name in wanted),
        default=None,
    )
    others = f"the nearest mesh for {world_size} ranks is {show(nearest)}" if nearest else ""
    others = others or "parallel.strategy=ddp trains on any number"
    raise ValueError(f"needs {needs}{started}; {others}")


def show(degrees: Mapping[str, int]) -> str:
    """The text of a mesh."""
    return ",".join(f"{name}={degree}" for name, degree in degrees.items())


def _factorizations(names: list[str], number: int) -> Iterator[dict[str, int]]:
    """All ways to write a number as a product of one degree for each name."""
    if not names:
        return
    if len(names) == 1:
        yield {names[0]: number}
        return
    for degree in range(1, number + 1):
        if number % degree == 0:
            for others in _factorizations(names[1:], number // degree):
                yield {names[0]: degree, **others}
