"""A sweep's YAML file: a grid or a list of values becomes cells with stable names.

program: [digits, train.steps=100]         # or ["--", script.py, --epochs, "3"]
grid: {optim.lr: [1e-3, 3e-4], seed: [0, 1]}
list: [{optim.lr: 1e-2, seed: 7}]          # further single cells
options: {nodes: 1, time: 10}              # options of `rollcall submit`, without dashes
throttle: 2                                # how many cells run at the same time
sort: val_accuracy                         # column by which `sweep status` sorts
"""

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.config.yaml_values import SHORT, read_texts
from rollcall.messages.refusal import RefusedError

KEYS = ("program", "grid", "list", "options", "throttle", "sort")
MAX_NAME = 80
"""Longest name of a cell, in characters, without its hash."""


@dataclass(frozen=True)
class SweepCell:
    """One combination of values, written as in the file."""

    name: str  # of the cell's run; it depends only on the values, not on the other cells
    values: dict[str, str]

    def words(self, is_training: bool) -> list[str]:
        """Return the program's arguments: `key=value` for training, `--key value` for a script."""
        if is_training:
            return [f"{key}={value}" for key, value in self.values.items()]
        return [word for key, value in self.values.items() for word in (f"--{key}", value)]


@dataclass(frozen=True)
class Sweep:
    """A sweep, as its file describes it."""

    name: str
    program: list[str]
    options: dict[str, Any]
    throttle: int | None
    sort: str | None
    cells: list[SweepCell]


def read(path: Path) -> Sweep:
    """Read a sweep's file; raise RefusedError if it does not have the form shown above."""
    values = read_texts(path, KEYS)
    program = values.get("program", [])
    options = values.get("options", {})
    throttle = values.get("throttle", "")
    if not isinstance(program, list) or not all(isinstance(word, str) for word in program):
        raise RefusedError(f"{path}: program: expected a list of words, found '{program}'")
    if not isinstance(options, dict):
        raise RefusedError(f"{path}: options: expected 'name: value' lines, found '{options}'")
    for key in ("throttle", "sort"):
        if not isinstance(values.get(key, ""), str):
            raise RefusedError(f"{path}: {key}: expected a single value, found {values[key]}")
    if throttle and (not throttle.isdecimal() or throttle == "0"):
        raise RefusedError(f"{path}: throttle: expected a whole number from 1, found {throttle}")
    cells = [_cell(path, choice) for choice in _choices(path, values)]
    if not cells:
        raise RefusedError(f"{path}: the sweep has no cells: add grid or list")
    names = [cell.name for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RefusedError(f"{path}: the cell {twice[0]} is listed twice")
    limit = int(throttle) if throttle else None
    return Sweep(path.stem, program, options, limit, values.get("sort"), cells)


def _choices(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    grid, listed = values.get("grid", {}), values.get("list", [])
    if not isinstance(grid, dict) or not all(isinstance(column, list) for column in grid.values()):
        wanted = "expected a list of values for each key, such as optim.lr: [1e-3, 3e-4]"
        raise RefusedError(f"{path}: grid: {wanted}; got {SHORT.repr(grid)}")
    if not isinstance(listed, list) or not all(isinstance(choice, dict) for choice in listed):
        raise RefusedError(f"{path}: list: expected 'key: value' groups, got {SHORT.repr(listed)}")
    product = itertools.product(*grid.values()) if grid else []
    return [*(dict(zip(grid, choice, strict=True)) for choice in product), *listed]


def _cell(path: Path, choice: dict[str, Any]) -> SweepCell:
    for key, value in choice.items():
        if not isinstance(value, str):
            raise RefusedError(f"{path}: {key}: expected a single value, found {SHORT.repr(value)}")
    plain = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in choice.items())
    name = re.sub(r"[^A-Za-z0-9._-]", "-", plain).lstrip("._-") or "cell"  # if it has no values
    short_keys = {key.rpartition(".")[2] for key in choice}
    if name != plain or len(name) > MAX_NAME or len(short_keys) < len(choice):
        digest = hashlib.sha256(repr(sorted(choice.items())).encode()).hexdigest()[:8]
        name = f"{name[:MAX_NAME]}_{digest}"
    return SweepCell(name, choice)
