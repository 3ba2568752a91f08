"""Read and write YAML values so that what looks like text stays text. No torch.

PyYAML reads YAML 1.1, in which `off`, `no`, `2026-11-22`, `2:00` and `010` are not text. Here, as
in YAML 1.2, only true, false, null and numbers are not; pydantic reads `on` and `010` where a key
is true or false, or a number.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from rollcall.refusal import ConfigError
from rollcall.text import did_you_mean

DEEPEST = 100
"""Levels of nesting; PyYAML's C code needs stack for each and crashes without."""
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
    """Puts text in quotes that this module or another reader of YAML would not read as text."""


for _name, _pattern, _first in RESOLVERS:
    _tag, _whole = f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern.pattern})$")
    _SafeLoader.add_implicit_resolver(_tag, _whole, list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"({FLOAT.pattern})$"), None)


def load(text: str) -> Any:
    """Parse one YAML document.

    Raises:
        yaml.YAMLError: it is not valid, or nested too deeply.
    """
    with _explained(text):
        return yaml.load(text, _SafeLoader)


def load_texts(text: str) -> Any:
    """Parse one YAML document whose values are all text, like `load`; 2:00:00 stays text."""
    with _explained(text):
        return yaml.load(text, yaml.CBaseLoader)


def read(path: Path, parse: Callable[[str], Any] = load) -> dict[str, Any]:
    """Read a file of `key: value` lines.

    Raises:
        ConfigError: it cannot be read, or has another form.
    """
    text = ""
    try:
        text = path.read_text()
        values = parse(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML{_problem(error, text)}") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of key: value, got a {type(values).__name__}")
    return values or {}


def read_texts(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read a file with a value, or a group of values, for some of these keys; all are text.

    Raises:
        ConfigError: it cannot be read, or has another form or key.
    """
    values = read(path, load_texts)
    for key in values:
        if key not in keys:
            hint = did_you_mean(key, keys) or f"; the keys are {', '.join(keys)}"
            raise ConfigError(f"{path}: unknown key '{key}'{hint}")
    return {key: value for key, value in values.items() if value != ""}


def _problem(error: Exception, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f": {' '.join(str(error).split())}"
    (line,) = text.splitlines()[mark.line : mark.line + 1] or [""]
    is_tab = line[mark.column : mark.column + 1] == "\t"
    problem = "indent with spaces, not with tabs" if is_tab else error.problem
    return f", line {mark.line + 1}, column {mark.column + 1}: {problem}"


def dump(values: Any, **options: Any) -> str:
    """Return values as YAML, which `load` reads as the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **options)
    return text


class _Open:
    """A list or mapping whose end has not been read."""

    def __init__(self, event: yaml.CollectionStartEvent) -> None:
        self.anchor: str | None = event.anchor
        self._keys: set[str] = set()
        self._is_mapping = isinstance(event, yaml.MappingStartEvent)
        self._is_key = False

    def add(self, event: yaml.NodeEvent) -> None:
        """Refuse a key that the mapping has already; PyYAML would drop the first value."""
        self._is_key = self._is_mapping and not self._is_key
        if self._is_key and isinstance(event, yaml.ScalarEvent):
            if event.value in self._keys:
                problem = f"the key '{event.value}' is given twice"
                raise yaml.MarkedYAMLError(None, None, problem, cast(Any, event.start_mark))
            self._keys.add(event.value)


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    try:
        within: list[_Open] = []
        for event in yaml.parse(text, yaml.CBaseLoader):
            if within and isinstance(event, yaml.NodeEvent):
                within[-1].add(event)
            if isinstance(event, yaml.CollectionStartEvent):
                within.append(_Open(event))
            elif isinstance(event, yaml.CollectionEndEvent):
                within.pop()
            elif isinstance(event, yaml.AliasEvent) and event.anchor in (o.anchor for o in within):
                raise yaml.YAMLError(f"*{event.anchor} stands inside of what it names")
            if len(within) > DEEPEST:
                raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")
        yield
    except yaml.YAMLError:
        raise
    # What PyYAML's constructors raise for values such as `!!int x`.
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise yaml.YAMLError(f"a value does not have the type of its tag ({error})") from None
