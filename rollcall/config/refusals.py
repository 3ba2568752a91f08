"""The mistakes of a configuration, in one line each. No torch.

Words of other frameworks are refused with a hint at rollcall's words.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

from rollcall.config import yaml_values
from rollcall.config.keys import describe, sections
from rollcall.messages.text import did_you_mean

UNKNOWN = ("extra_forbidden", "invalid_key")
"""Types of error of a key that does not exist, or is not text."""


def explain(errors: Iterable[Any], source: str, given: Collection[str]) -> str:
    """Return one line for each refused key; it names the source unless the key was `given`."""
    by_key: dict[str, list[Any]] = {}
    for error in errors:
        for key in _keys(error):
            by_key.setdefault(key, []).append(error)
    prefixes = {key: "" if is_given(key, given) else f"{source}: " for key in by_key}
    return "\n".join(prefixes[key] + _line(key, items) for key, items in by_key.items())


def is_given(key: str, given: Collection[str]) -> bool:
    """Return True if a key, a part of it or what it is a part of is among those `given`."""
    return any(
        f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in given
    )


def unknown_key(key: str) -> str:
    """Return the refusal of a key that does not exist, with the key that was probably meant."""
    known = [item.name for item in describe()]
    section, _, last = key.rpartition(".")
    if key in known:  # only a file has it with its dot
        return f"'{key}': expected a section with keys in a file, {section}: {{{last}: ...}}"
    word = _plain(key)
    meant = _find(synonyms()["keys"], word)
    answer = f"use {meant} ({_meaning(meant)})" if meant else _find(synonyms()["elsewhere"], word)
    if answer:
        code = f", or {section}.args.{last} for code of your own"
        return f"unknown key '{key}': {answer}{code if section in ('model', 'data') else ''}"
    import difflib  # here: only mistakes need it

    last_parts = {last_part(name): name for name in known}
    parts = difflib.get_close_matches(last, last_parts, 1, 0.7)
    alike = [
        name for name in known if difflib.SequenceMatcher(a=last, b=last_part(name)).ratio() >= 0.5
    ]
    nearest = difflib.get_close_matches(key, alike, 1, 0.6) or [last_parts[part] for part in parts]
    if nearest:
        return f"unknown key '{key}', did you mean '{nearest[0]}'?"
    where = section if section in sections() else "all"
    return f"unknown key '{key}'; `rollcall train --help {where}` lists the keys"


@cache
def synonyms() -> dict[str, Any]:
    """Return synonyms.yaml, which explains itself."""
    return dict(yaml_values.table(__file__, "synonyms.yaml"))


def about_option(words: Sequence[str], cutoff: float = 0.8) -> str:
    """Return advice about an option that is like a key by `cutoff` (1: equal), else nothing."""
    import difflib  # here: only mistakes need it

    option, equals, value = words[0].lstrip("-").partition("=")
    if not equals and len(words) > 1 and not re.match("-|.*=", words[1]):
        value = words[1]
    word = _plain(option)
    names = {re.sub("[._]", "-", item.name): item.name for item in describe()}
    key = names.get(re.sub("[._]", "-", option), "")
    if not key and (answer := _find(synonyms()["options"] | synonyms()["elsewhere"], word)):
        return answer
    parts = difflib.get_close_matches(word, [*map(last_part, names.values())], 1, cutoff)
    alike = [name for name in names.values() if last_part(name) in parts]
    if key := key or _find(synonyms()["keys"], word) or (alike[0] if len(alike) == 1 else ""):
        key, _, fixed = key.partition("=")
        if fixed and value.lower() in ("false", "no", "off", "0"):
            return f"leave it out; {key} has another value unless you set it ({_meaning(key)})"
        return f"write {key}={fixed or value or '...'} ({_meaning(key)})"
    return ""


def about_command(word: str) -> str:
    """Return advice about a command of another tool; an empty text if it is unknown."""
    return _find(synonyms()["commands"], word)


def last_part(name: str) -> str:
    """Return a key's name in its section."""
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return last_part(name).lower().replace("-", "_")


def _meaning(key: str) -> str:
    text = next(item.meaning for item in describe() if item.name == key.partition("=")[0])
    first = text.partition(". ")[0].rstrip(".")
    return first[0].lower() + first[1:]


def about_value(key: str, value: Any) -> str:
    """Return advice about another framework's value; an empty text if the value is unknown."""
    if not isinstance(value, str | int | float):  # a few YAML aliases can make an endless text
        return ""
    return _find(synonyms()["values"].get(key, {}), re.sub(r":\d+$", ":n", str(value).lower()))


def _find(table: dict[str, str], word: str) -> str:
    return next((answer for words, answer in table.items() if word in words.split()), "")


def _keys(error: Any) -> list[str]:
    """Return the dotted key of an error, or the keys of an unknown section."""
    parts = [str(part) for part in error["loc"]]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if error["type"] in UNKNOWN:
        within = error["input"] if isinstance(error["input"], dict) else {}
        return [f"{names[0]}.{key}" for key in within] or names[:1]
    known = {*sections(), *(item.name for item in describe())}
    return [name for name in names if name in known][:1]  # pydantic appends the members of unions


def _line(key: str, errors: list[Any]) -> str:
    value = errors[0]["input"]
    if errors[0]["type"] in UNKNOWN:
        return unknown_key(key)
    if answer := about_value(key, value):
        return f"{key}: unknown {value!r}; {answer}"
    got = "an empty value" if value is None else yaml_values.SHORT.repr(value)
    if key in sections():
        first = next(item.name for item in describe() if item.name.startswith(f"{key}."))
        hint = "; indent its keys" if value is None else ""
        if isinstance(value, str) and first == f"{key}.name":
            hint = f", did you mean {first}={value}?"
        elif isinstance(value, str) and (answer := _find(synonyms()["elsewhere"], key)):
            hint = f"; {answer}"
        return f"{key}: expected a section with keys such as {first}, got {got}{hint}"
    wanted = " or ".join(dict.fromkeys(map(expected, errors))).replace("'", "")
    item = next((item for item in describe() if item.name == key), None)
    default = item.default if item else None
    if wanted in ("a number", "an integer") and isinstance(default, int | float):
        wanted += f" such as {default}"
    if item and item.type.endswith("| null") and wanted.startswith(("a number", "an integer")):
        wanted += " or null"
    choices = [expected(error) for error in errors if error["type"] == "literal_error"]
    words = re.sub("[',]", "", " ".join(choices)).split()
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    if isinstance(value, str) and re.fullmatch(r"[-+.\de]+(,[-+.\de]+)+", value):
        hint = f"; {_find(synonyms()['elsewhere'], 'multirun')}"
    return f"{key}: expected {wanted}, got {got}{hint}"


def expected(error: Any) -> str:
    """Return the value that was expected, according to one of pydantic's errors."""
    text = _find(synonyms()["expected"], error["type"])
    return text.format(**error.get("ctx", {})) if text else f"another value ({error['msg']})"
