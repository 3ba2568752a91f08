"""Chips, their links, and software, as chips.yaml, machines.yaml and the user's file say."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from rollcall.config import chips, yaml_values
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean

FILE = Path(__file__).with_name("machines.yaml")
FIXED = ("name", "flops")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU and its links, in bytes, seconds and FLOP per second."""

    name: str
    flops: Mapping[str, float]  # by number format
    memory: float
    bandwidth: float
    inside: float  # of the links to the GPUs of its node, in one direction
    between: float  # of its share of the links between nodes
    product: float  # the fraction of `flops` that large matrix products reach
    attention: float  # the same for fused attention
    tuned: float  # the same for kernels written for this chip
    tuned_product: float
    node: int  # GPUs that the links inside join
    host: int  # GPUs of one host, if the links join several


Software = SimpleNamespace
"""The numbers of a program, by the names that machines.yaml explains; times are in seconds."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A chip, the software that runs there, and the GPUs that the links inside join."""

    chip: Chip
    software: Software
    node: int
    factor: float = 1.0  # measured over predicted time of a step; not 1 if calibrated

    @property
    def host(self) -> int:
        """GPUs of one host."""
        return self.chip.host or self.node


class Machines:
    """All chips, fabrics and software that the planner knows."""

    def __init__(self, path: str | None = None) -> None:
        """Read the shipped files and one of the user's; RefusedError if it cannot be used."""
        self._known: dict[str, dict[str, Any]] = yaml_values.load(FILE.read_text())
        self._known["chips"] = chips.known()
        if not path:
            return
        try:
            for kind, entries in (yaml_values.load(Path(path).read_text()) or {}).items():
                if kind not in self._known:
                    expected = ", ".join(self._known)
                    raise RefusedError(f"{path}: unknown section '{kind}'; expected {expected}")
                known = self._known[kind]
                _check(kind, entries, [{"source": "", "fitted": ""}, *known.values()])
                if kind == "chips":
                    chips.update(known, entries)
                else:
                    known |= {name: known.get(name, {}) | entries[name] for name in entries}
        except OSError as error:
            raise RefusedError(f"--machines {path}: {error.strerror}") from None
        except (AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
            raise RefusedError(
                f"--machines {path}: expected a YAML file with sections such as `chips:`, in the "
                f"form of docs/plan.md: {' '.join(str(error).split())}"
            ) from None

    def check(self, program: str) -> None:
        """Raise RefusedError if no entry of the software has this name."""
        if program.lower() not in (known := [name.lower() for name in self._known["software"]]):
            more = did_you_mean(program, known) or f"; choose from {', '.join(known)}"
            raise RefusedError(f"unknown program '{program}'{more}")

    def is_named(self, chip: Chip, name: str) -> bool:
        """Return True if torch reports this chip by the name."""
        return chips.find(name, self._known["chips"]) == chip.name

    def chip(self, word: str) -> Chip:
        """Return the chip of a name, such as h100 or the one that torch reports."""
        table = self._known["chips"]
        name = chips.find(word, table)
        if not name:
            whole = [entry for entry, values in table.items() if "memory" in values]
            more = did_you_mean(word.upper(), whole) or f"; choose from {', '.join(whole)}"
            raise RefusedError(f"unknown chip '{word}'{more}")
        known = {"node": 8, "host": 0, **table[name]}
        tuned = {"tuned": known.get("attention"), "tuned_product": known.get("product")}
        numbers: dict[str, Any] = {**tuned, **known}
        fields = [field.name for field in dataclasses.fields(Chip) if field.name not in FIXED]
        if missing := [key for key in fields if key not in numbers]:
            raise RefusedError(
                f"{name} cannot be planned without its {', '.join(missing)}; give them in a file "
                "for --machines (docs/plan.md)"
            )
        values = {key: numbers.pop(key) for key in fields}
        values |= {key: int(values[key]) for key in chips.COUNTS}
        return Chip(name, numbers, **values)

    def software(self, word: str, chip: str = "", fabric: str | None = None) -> Software:
        """Return the numbers of the program whose entry's words are most in name and chip."""
        known = self._known["software"]
        text = f"{word} {chip}".lower()
        fitting = [name for name in known if all(part in text for part in name.lower().split())]
        values = {**known["default"], **known[max(fitting, key=len, default="default")]}
        network = fabric or values["fabric"]
        fabrics = {name.lower(): entry for name, entry in self._known["fabrics"].items()}
        if "hop" not in fabrics.get(network.lower(), ()):
            choices = ", ".join(name for name, entry in fabrics.items() if "hop" in entry)
            raise RefusedError(f"unknown fabric '{network}'; choose from {choices}")
        links = fabrics["infiniband"] | fabrics[network.lower()]
        values |= {"hop": links["hop"] * 1e-6, "reach": links["reach"]}
        values |= {key: values[key] * 1e-3 for key in ("host", "expert", "stall")}
        return Software(**{**values, "name": word})

    def machine(
        self,
        chip: str,
        software: str = "rollcall",
        precision: str = "bf16",
        node: int | None = None,
        fabric: str | None = None,
    ) -> Machine:
        """Return a chip with its software."""
        known = self.chip(chip)
        if precision not in known.flops:
            raise RefusedError(
                f"{known.name} has no {precision}; choose precision from {', '.join(known.flops)}"
            )
        size = known.node if known.host else node or known.node  # a rack's hosts share the links
        return Machine(known, self.software(software, known.name, fabric), size)


def _check(kind: str, entries: Any, known: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for a key that no known entry has, and for a value of another type."""
    sample = {key: value for entry in known for key, value in entry.items()}
    for name, entry in entries.items():
        for key, value in entry.items():
            if key not in sample:
                raise ValueError(f"{kind}: unknown key '{key}'{did_you_mean(str(key), sample)}")
            expected = type(sample[key]) if type(sample[key]) in (bool, str) else float
            is_number = type(value) in (int, float) and 0 <= value < math.inf
            if not (is_number if expected is float else type(value) is expected):
                words = {bool: "true or false", str: "text", float: "a number from 0 on"}[expected]
                raise ValueError(f"{name}: {key}: expected {words}, got {value!r}")
