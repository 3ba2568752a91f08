"""Read and write YAML values so that words and dates stay text. No torch.

PyYAML reads YAML 1.1, in which `off`, `no`, `2026-11-22`, `2:00` and `010` are not text. Here, as
in YAML 1.2, all values but true, false, null and numbers are text; pydantic converts `on` and `010`
if a key is true or false, or a number.
"""

import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from rollcall.messages.refusal import ConfigError
from rollcall.messages.text import did_you_mean
from rollcall.system.files import read_whole

SHORT = reprlib.Repr()
SHORT.maxlevel = 2  # a few lines of YAML aliases can expand to gigabytes
DEEPEST = 100
"""Most levels of nesting; PyYAML's C code needs stack for each and crashes if it runs out."""
FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.nan"
)
RESOLVERS = (
    ("bool", re.compile("true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]{0,99})|0x[0-9a-fA-F]{1,99}"), "-+0123456789"),
    ("float", FLOAT, "-+0123456789."),
    ("null", re.compile("~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("merge", re.compile("<<"), "<"),
)


class _SafeLoader(yaml.CSafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as PyYAML declares it)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which this module or another reader would not read as text."""


for _name, _pattern, _first in RESOLVERS:
    _tag, _whole = f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern.pattern})$")
    _SafeLoader.add_implicit_resolver(_tag, _whole, list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"({FLOAT.pattern})$"), None)


def load(text: str, as_text: bool = False) -> Any:
    """Parse a YAML document, all values `as_text` or typed; YAMLError if invalid or too deep."""
    try:
        _check(text)
        return yaml.load(text, yaml.CBaseLoader) if as_text else yaml.load(text, _SafeLoader)
    # PyYAML's constructors raise these for values such as `!!int x`.
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise yaml.YAMLError(f"a value does not have the type of its tag ({error})") from None


def table(module: str, name: str) -> Any:
    """Return the content of a YAML file of rollcall's, which lies beside the file of a module."""
    return load(Path(module).with_name(name).read_text())


def read(path: Path, as_text: bool = False) -> dict[str, Any]:
    """Read a file of `key: value` lines; raise ConfigError if it cannot be read as such."""
    text = ""
    try:
        text = read_whole(path).decode()
        values = load(text, as_text)
    except OSError as error:
        why = f"cannot be read: {error.strerror}; expected a YAML file with lines of key: value"
        raise ConfigError(f"{path}: {why}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML{_problem(error, text)}") from None
    if values is not None and not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(f"{path}: expected lines of key: value, got {kind}")
    return values or {}


def read_texts(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read a file with values, or groups of values, of these keys; keep all as text."""
    values = read(path, as_text=True)
    for key in values:
        if key not in keys:
            hint = did_you_mean(key, keys) or f"; the keys are {', '.join(keys)}"
            raise ConfigError(f"{path}: unknown key '{key}'{hint}")
    return {key: value for key, value in values.items() if value != ""}


def _problem(error: Exception, text: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return ": expected text in UTF-8, got other bytes"
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f": {' '.join(str(error).split())}"
    (line,) = text.splitlines()[mark.line : mark.line + 1] or [""]
    is_tab = line[mark.column : mark.column + 1] == "\t"
    problem = "indent with spaces, not with tabs" if is_tab else error.problem
    if problem == "mapping values are not allowed in this context":
        problem = "indent the keys of a section alike, and put text that has ': ' in quotes"
    elif problem and problem.startswith("did not find expected"):
        problem += "; close each bracket and quote, and indent the keys of a section alike"
    return f", line {mark.line + 1}, column {mark.column + 1}: {problem}"


def dump(values: Any, **options: Any) -> str:
    """Return values as YAML, which `load` reads as the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **options)
    return text


@dataclass
class _Open:
    """A list or mapping whose end has not been read."""

    anchor: str | None
    is_mapping: bool
    nodes: int = 0  # of a mapping, every other one is a key
    keys: set[str] = field(default_factory=set)


def _check(text: str) -> None:
    """Refuse what PyYAML would accept, or crash on: repeated keys, endless aliases, deep nests."""
    within: list[_Open] = []
    for event in yaml.parse(text, yaml.CBaseLoader):
        if within and isinstance(event, yaml.NodeEvent):
            above = within[-1]
            above.nodes += 1
            is_key = above.is_mapping and above.nodes % 2
            if is_key and isinstance(event, yaml.ScalarEvent):
                if event.value in above.keys:  # PyYAML would drop the first value
                    problem = f"the key '{event.value}' is given twice"
                    raise yaml.MarkedYAMLError(None, None, problem, cast(Any, event.start_mark))
                above.keys.add(event.value)
        if isinstance(event, yaml.CollectionStartEvent):
            within.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            within.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in (o.anchor for o in within):
            raise yaml.YAMLError(f"the alias *{event.anchor} refers to itself")
        if len(within) > DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")
