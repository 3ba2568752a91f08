"""The table of chips: chips.yaml, and files of the same form."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rollcall.config import yaml_values
from rollcall.config.schema import ConfigError

FILE = Path(__file__).with_name("chips.yaml")
Chips = dict[str, dict[str, float]]
"""The numbers of each chip, by name and key."""
COUNTS = ("node", "host")
OTHER = {"mig", "laptop", "ti", "super", "d", "nvl"}
"""Words after a chip's name that make it another chip: a slice, or a slower or faster version."""


def known(file: str | None = None) -> Chips:
    """Return the chips of chips.yaml and of a file for `log.chips`; refuse another form."""
    table = numbers(yaml_values.load(FILE.read_text()))
    if file:
        try:
            update(table, yaml_values.load(Path(file).read_text()))
        except (OSError, AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"log.chips={file}: expected a YAML file of chips with operations per second by "
                f"precision, such as 'H100: {{bf16: 989e12}}': {error}"
            ) from None
    return table


def numbers(content: Any) -> Chips:
    """Return the numbers of each chip in a YAML file's content; an error for another form."""
    table = {
        str(name): {key: float(v) for key, v in chip.items() if key not in ("source", "fitted")}
        for name, chip in content.items()
    }
    for name, chip in table.items():
        for key, value in chip.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: {key}: expected a number above 0")
            if key in COUNTS and value % 1:
                raise ValueError(f"{name}: {key}: expected a whole number of GPUs")
    return table


def update(table: Chips, content: Any) -> None:
    """Add the chips of a YAML file to a table, or replace some of their values."""
    for name, chip in numbers(content).items():
        table[name] = table.get(name, {}) | chip


def find(name: str, table: Iterable[str]) -> str | None:
    """Return the longest entry whose words are all in a chip's name, in any order and case."""
    words = _words(name)
    fitting = [entry for entry in table if words & OTHER <= _words(entry) <= words]
    return max(fitting, key=len, default=None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[\w.]+", name.lower()))
