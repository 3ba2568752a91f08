"""What does a sweep vary? A YAML file with a grid or a list becomes cells with stable names.

program: [digits, train.steps=100]         # or ["--", script.py, --epochs, "3"]
grid: {optim.lr: [1e-3, 3e-4], seed: [0, 1]}
list: [{optim.lr: 1e-2, seed: 7}]          # further cells, one by one
options: {nodes: 1, time: 10}              # as on submit.py's command line, without the dashes
throttle: 2                                # cells at a time
sort: accuracy                             # what `sweep status` sorts by
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KEYS = ("program", "grid", "list", "options", "throttle", "sort")
LONGEST = 80
"""Letters of a cell's name."""


class SweepError(ValueError):
    """A sweep that cannot be read or run; the message names the file and the key."""


@dataclass(frozen=True)
class Cell:
    """One choice of values, each as it stands in the file.

    Attributes:
        name: of the cell's run; it depends on the values alone, not on the other cells.
    """

    name: str
    values: dict[str, str]

    def words(self, is_training: bool) -> list[str]:
        """What the program is told: `key=value` for training, `--key value` for a script."""
        if is_training:
            return [f"{key}={value}" for key, value in self.values.items()]
        return [word for key, value in self.values.items() for word in (f"--{key}", value)]


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file describes it."""

    name: str
    program: list[str]
    options: dict[str, Any]
    throttle: int | None
    sort: str | None
    cells: list[Cell]


def read(path: Path) -> Sweep:
    """Read a sweep's file.

    Raises:
        SweepError: it cannot be read, or is not as the text above says.
    """
    try:
        # Every value is text, as it stands there: YAML would read 2:00:00 as 7200.
        values = yaml.load(path.read_text(), yaml.CBaseLoader)
    except OSError as error:
        raise SweepError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SweepError(f"{path}: expected 'key: value' lines with {', '.join(KEYS)}")
    for key in values:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"the keys are {', '.join(KEYS)}"
            raise SweepError(f"{path}: unknown key '{key}', {hint}")
    program = values.get("program", [])
    options = values.get("options", {})
    throttle = values.get("throttle", "")
    if not isinstance(program, list) or not all(isinstance(word, str) for word in program):
        raise SweepError(f"{path}: program: expected a list of words, found '{program}'")
    if not isinstance(options, dict):
        raise SweepError(f"{path}: options: expected 'name: value' lines, found '{options}'")
    if throttle and (not throttle.isdecimal() or throttle == "0"):
        raise SweepError(f"{path}: throttle: a whole number from 1 on is expected, not {throttle}")
    cells = [_cell(path, choice) for choice in _choices(path, values)]
    if not cells:
        raise SweepError(f"{path}: there are no cells: add grid or list")
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SweepError(f"{path}: the cell {twice} stands there twice")
    limit = int(throttle) if throttle else None
    return Sweep(path.stem, program, options, limit, values.get("sort"), cells)


def _choices(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    grid, listed = values.get("grid", {}), values.get("list", [])
    if not isinstance(grid, dict) or not all(isinstance(column, list) for column in grid.values()):
        raise SweepError(f"{path}: grid: expected a list of values for each key")
    if not isinstance(listed, list) or not all(isinstance(choice, dict) for choice in listed):
        raise SweepError(f"{path}: list: expected a list of 'key: value' groups")
    product = itertools.product(*grid.values()) if grid else []
    return [*(dict(zip(grid, choice, strict=True)) for choice in product), *listed]


def _cell(path: Path, choice: dict[str, Any]) -> Cell:
    for key, value in choice.items():
        if not isinstance(value, str):
            raise SweepError(f"{path}: {key}: expected a single value, found {value}")
    plain = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in choice.items())
    name = re.sub(r"[^A-Za-z0-9._-]", "-", plain).lstrip("._-")
    whole = repr(sorted(choice.items()))
    short_keys = [key.rpartition(".")[2] for key in choice]
    if name != plain or len(name) > LONGEST or len(set(short_keys)) < len(short_keys):
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        name = f"{name[:LONGEST]}_{digest}"
    return Cell(name, choice)
