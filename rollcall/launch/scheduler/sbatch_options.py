"""The options of sbatch, from sbatch.yaml, which explains itself."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollcall.config import yaml_values
from rollcall.messages import text

_TABLE: dict[str, Any] = yaml_values.table(__file__, "sbatch.yaml")
FLAGS = frozenset(_TABLE["flags"].split())
WITH_VALUE = frozenset(_TABLE["with-value"].split())
SHORT: Mapping[str, str] = _TABLE["short"]
ENVIRONMENT: Mapping[str, str] = {
    f"SBATCH_{name.upper().replace('-', '_')}": name for name in _TABLE["with-variable"].split()
} | _TABLE["variables"]
ONE_OF = tuple(frozenset(names.split()) for names in _TABLE["one-of"])


def wrong_value(passed: Mapping[str, str | None]) -> str:
    """Return the refusal of a value, for a run without an sbatch that would check it."""
    for names, (form, expected) in _TABLE["values"].items():
        for name in passed.keys() & {*names.split()}:
            value = passed[name]
            if value is not None and not re.fullmatch(form, value, re.IGNORECASE):
                return f"--{name}: expected {expected}, not '{value}'"
    return ""


def did_you_mean(option: str, own: Iterable[str] = ()) -> str:
    """Return the part of a refusal that names the option meant; empty unless it looks like one."""
    if option in _TABLE["elsewhere"]:
        return f", did you mean '--{_TABLE['elsewhere'][option]}'?"
    return text.did_you_mean(option, sorted({*own, *FLAGS, *WITH_VALUE}), 0.8, "--")
