"""Chips, their links, and software, as machines.yaml and files of the user's describe them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollcall.refusal import RefusedError
from rollcall.text import did_you_mean

FILE = Path(__file__).with_name("machines.yaml")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU and its links, in bytes, seconds and FLOP per second."""

    name: str
    memory: float
    bandwidth: float
    inside: float  # of the links to the GPUs of its node, in one direction
    between: float  # of its share of the links between nodes
    flops: Mapping[str, float]  # by number format
    product: float  # the fraction of `flops` that large matrix products reach
    attention: float  # the same for fused attention
    node: int = 8  # GPUs in a node


@dataclasses.dataclass(frozen=True)
class Software:
    """The numbers of a program, in seconds.

    Attributes:
        host: in which a process starts the kernels of one layer, forward and backward.
        stall: that each further tensor rank adds to a layer if a pipeline crosses nodes.
        hop: of one step of a ring between nodes.
        attention: speed relative to the chip's fused attention.
        fused: whether attention keeps no (length, length) matrix.
        sequence: whether tensor ranks divide the activations between the cut layers.
        overlap: whether gradients travel during the backward pass also if ZeRO divides them.
        balanced: whether the head counts as layers when stages are cut.
        fills: whether a pipeline needs a micro-batch for each stage but one.
    """

    name: str
    host: float = 2e-3
    stall: float = 0.0
    hop: float = 1e-5
    attention: float = 1.0
    fused: bool = True
    sequence: bool = True
    overlap: bool = True
    balanced: bool = False
    fills: bool = False


@dataclasses.dataclass(frozen=True)
class Machine:
    """A chip, the software that runs there, and the GPUs of a node."""

    chip: Chip
    software: Software
    node: int
    factor: float = 1.0  # measured over predicted time of a step


class Machines:
    """All chips, fabrics, software and factors that the planner knows."""

    def __init__(self, own: str | None = None) -> None:
        """Read the shipped file and one of the user's; RefusedError if it cannot be used."""
        self._known: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
        self._known["factors"] = {}
        if own:
            for kind, entries in _read(own).items():
                if kind not in self._known or not isinstance(entries, dict):
                    raise RefusedError(
                        f"{own}: unknown section '{kind}'; expected {', '.join(self._known)}"
                    )
                self._known[kind].update(entries)

    def chip(self, word: str) -> Chip:
        """Return the chip of a name; any case, and without its memory, will do."""
        name = self._name("chips", word)
        values = self._values("chips", name, Chip)
        try:
            for key in ("memory", "bandwidth", "inside", "between"):
                values[key] *= 1e9
            values["flops"] = {key: value * 1e12 for key, value in values["flops"].items()}
            return Chip(name=name, **values)
        except (KeyError, TypeError) as error:
            raise RefusedError(f"--machines: chip '{name}' is incomplete: {error}") from None

    def software(self, word: str, fabric: str | None = None) -> Software:
        """Return a program's numbers, or the default's if the program is not known."""
        name = word if word in self._known["software"] else "default"
        values = self._values("software", name, Software)
        place = fabric or self._known["software"][name].get("fabric", "infiniband")
        hop = self._known["fabrics"][self._name("fabrics", place)]["hop"] * 1e-6
        for key in ("host", "stall"):
            if key in values:
                values[key] *= 1e-3
        return Software(word, **values, hop=hop)

    def machine(
        self,
        chip: str,
        software: str = "default",
        precision: str = "bf16",
        node: int | None = None,
        fabric: str | None = None,
    ) -> Machine:
        """Return a chip with its software, and the factor that the user's file has for them."""
        found = self.chip(chip)
        if precision not in found.flops:
            raise RefusedError(
                f"{found.name} has no {precision}; choose precision from {', '.join(found.flops)}"
            )
        key = f"{found.name} {precision} {software}"
        factor = float(self._known["factors"].get(key, 1.0))
        links = found.node if found.node > 8 else node or found.node  # racks share NVLink
        return Machine(found, self.software(software, fabric), links, factor)

    def _name(self, kind: str, word: str) -> str:
        known = self._known[kind]
        family = word.lower().partition("-")[0]  # as in H200-141GB and H100-SXM5
        matching = [name for name in known if name.lower().startswith(family)] if family else []
        exact = [name for name in matching if name.lower() == word.lower()]
        if not matching:
            hint = did_you_mean(word.upper(), known)
            raise RefusedError(
                f"unknown {kind[:-1]} '{word}'{hint or f'; choose from {chr(44).join(known)}'}"
            )
        return (exact or matching)[-1]

    def _values(self, kind: str, name: str, target: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(target)}
        entry = self._known[kind][name]
        return {key: value for key, value in entry.items() if key in names}


def _read(path: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise RefusedError(f"--machines {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise RefusedError(f"--machines {path}: not valid YAML: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(f"--machines {path}: expected sections such as `chips:`")
    return found
