"""What is wrong with a configuration, in one line per mistake. No torch."""

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable
from typing import Any

from rollcall.config.keys import describe, sections
from rollcall.config.synonyms import about_key, about_value
from rollcall.text import did_you_mean

EXPECTED = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text (put numbers in quotes)",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "letters, digits and . _ - (not first), at most 100 characters",
    "finite_number": "a finite number",
    "dict_type": "a mapping such as {{width: 64}}",
    "not_a_number": "a number",
    "value_error": "{error}",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
}
"""What was expected, for each of pydantic's types of error."""
UNKNOWN = ("extra_forbidden", "invalid_key")
"""Types of error of a key that does not exist, and of one that is not even text."""
SHORT = reprlib.Repr()
SHORT.maxlevel = 2  # a few lines of YAML aliases can expand to gigabytes


def explain(errors: Iterable[Any], source: str, given: Collection[str]) -> str:
    """Return one line for each refused key; it begins with the source unless the key was given."""
    found: dict[str, list[Any]] = {}
    for error in errors:
        for key in _keys(error):
            found.setdefault(key, []).append(error)
    return "\n".join(
        ("" if _overlaps(key, given) else f"{source}: ") + _line(key, items)
        for key, items in found.items()
    )


def unknown_key(key: str) -> str:
    """Refuse a key that does not exist, with another framework's key or the nearest one."""
    if answer := about_key(key):
        return f"unknown key '{key}': {answer}"
    known = [item.name for item in describe()]
    last_parts = {name.rpartition(".")[2]: name for name in known}
    match = difflib.get_close_matches(key, known, 1, 0.6) or [
        last_parts[part]
        for part in difflib.get_close_matches(key.rpartition(".")[2], last_parts, 1, 0.7)
    ]
    hint = (
        f", did you mean '{match[0]}'?" if match else "; `rollcall train --help all` lists all keys"
    )
    return f"unknown key '{key}'{hint}"


def _keys(error: Any) -> list[str]:
    """Return the dotted key of an error, or the keys of an unknown section."""
    parts = [str(part) for part in error["loc"]]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if error["type"] in UNKNOWN:
        within = error["input"] if isinstance(error["input"], dict) else {}
        return [f"{names[0]}.{key}" for key in within] or names[:1]
    known = {*sections(), *(item.name for item in describe())}
    return [name for name in names if name in known][:1]  # pydantic appends the members of unions


def _overlaps(key: str, given: Collection[str]) -> bool:
    return any(
        f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in given
    )


def _line(key: str, errors: list[Any]) -> str:
    value = errors[0]["input"]
    if errors[0]["type"] in UNKNOWN:
        return unknown_key(key)
    if answer := about_value(key, value):
        return f"{key}: unknown {value!r}; {answer}"
    got = "an empty value" if value is None else SHORT.repr(value)
    if key in sections():
        first = next(item.name for item in describe() if item.name.startswith(f"{key}."))
        return f"{key}: expected a section with keys such as {first}, got {got}"
    wanted = " or ".join(dict.fromkeys(map(expected, errors))).replace("'", "")
    choices = [expected(error) for error in errors if error["type"] == "literal_error"]
    words = re.sub("[',]", "", " ".join(choices)).split()
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    return f"{key}: expected {wanted}, got {got}{hint}"


def expected(error: Any) -> str:
    """Return what one of pydantic's errors says was expected."""
    if error["type"] not in EXPECTED:
        return f"another value ({error['msg']})"
    return EXPECTED[error["type"]].format(**error.get("ctx", {}))
