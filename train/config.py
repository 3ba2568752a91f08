"""What did a user ask for? A recipe and `key=value` words become a checked Config. No torch.

The keys are those of `schema.py`. A wrong key or value raises ConfigError before any process group
exists.
"""

from __future__ import annotations

import difflib
import json
import reprlib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from train import combinations
from train.parallel import options, virtual
from train.schema import Config, ConfigError, Section

__all__ = ["Config", "ConfigError", "describe", "origins", "parse", "recipes", "schema"]

RECIPES = Path(__file__).parent / "recipes"
SHORT = reprlib.Repr()
SHORT.maxlevel = 2  # a few lines of YAML aliases can stand for gigabytes


def recipes() -> list[str]:
    """Names of the recipes that come with rollcall."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parse(words: Sequence[str]) -> tuple[str, Config]:
    """Read `[recipe or file] [key=value …]`; return the recipe's name and the configuration.

    Args:
        words: command-line words. The first without `=` is a recipe's name or a YAML file
            (default: digits); each of the others sets one key, its value read as YAML.

    Raises:
        ConfigError: unknown recipe, key or file, a value of the wrong type or out of range, or a
            combination that cannot work.
    """
    source = _source(words)
    values = _read(source)
    for word in words:
        if "=" in word:
            _assign(values, word)
    return Path(source).stem, _build(values, source)


def origins(words: Sequence[str]) -> dict[str, str]:
    """Where the value of each key comes from: the command line, the recipe's file, the default.

    Args:
        words: as `parse` takes them, without mistakes.
    """
    source = _source(words)
    found = dict.fromkeys((name for name, *_ in describe()), "default")
    found |= dict.fromkeys(_flat(_read(source)), str(_path(source)))
    given: dict[str, Any] = {}
    for word in words:
        if "=" in word:
            _assign(given, word)
    return found | dict.fromkeys(_flat(given), "command line")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys that have values."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _source(words: Sequence[str]) -> str:
    """The recipe or file among the words."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"there is no option {word}; keys are set as key=value, see --help")
    sources = [word for word in words if "=" not in word]
    if len(sources) > 1:
        raise ConfigError(
            f"'{sources[1]}' is neither a key=value pair nor a second recipe: one recipe or file "
            f"is expected ('{sources[0]}' is the first), then key=value pairs"
        )
    return sources[0] if sources else "digits"


def _is_file(source: str) -> bool:
    return source.endswith((".yaml", ".yml")) or "/" in source


def _path(source: str) -> Path:
    return Path(source) if _is_file(source) else RECIPES / f"{source}.yaml"


def describe() -> Iterator[tuple[str, str, Any, str]]:
    """Every key of the schema as (dotted name, type, default, meaning)."""
    yield from _keys(Config, "")


def schema() -> str:
    """The JSON schema of a recipe file, by which editors complete and check the YAML."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield (
                prefix + name,
                _type_name(field.annotation),
                field.default,
                field.description or "",
            )


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return {str: "text", int: "integer", float: "number", bool: "true | false"}[annotation]


def _read(source: str) -> dict[str, Any]:
    try:
        values = yaml.load(_path(source).read_text(), yaml.CSafeLoader)
    except FileNotFoundError:
        if _is_file(source):
            raise ConfigError(f"{source}: there is no such file") from None
        raise ConfigError(
            f"there is no recipe '{source}'{_nearest(source, recipes())}; the recipes are "
            f"{', '.join(recipes())}; a file of your own must end in .yaml"
        ) from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected 'key: value' lines, found a {type(values).__name__}")
    return values


def _assign(values: dict[str, Any], word: str) -> None:
    name, _, text = word.partition("=")
    try:
        value = yaml.load(text, yaml.CSafeLoader)
    except yaml.YAMLError:
        raise ConfigError(f"{word}: the value is not YAML; quote it") from None
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{word}: '{section}' is not a group of keys")
    values[last] = value


def _build(values: dict[str, Any], source: str) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, source) for item in error.errors())) from None
    _check_combinations(config)
    return config


def _explain(item: Any, source: str) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = [name for name, *_ in describe()]
        nearest = _nearest(key, known)
        return f"{source}: unknown key '{key}'{nearest}; `python -m train --help` lists all keys"
    problem = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    if item["type"] == "string_pattern_mismatch":
        problem = "expected letters, digits and the signs . _ - (not first), at most 100 in all"
    return f"{source}: {key}: {problem}, not {SHORT.repr(item['input'])}"


def _nearest(word: str, known: Sequence[str]) -> str:
    last_parts = {name.rpartition(".")[2]: name for name in known}
    match = difflib.get_close_matches(word, known, 1, 0.6) or [
        last_parts[part]
        for part in difflib.get_close_matches(word.rpartition(".")[2], last_parts, 1, 0.7)
    ]
    return f", did you mean '{match[0]}'?" if match else ""


def _check_combinations(config: Config) -> None:
    micro, batch = config.data.micro_batch, config.data.global_batch
    if micro is not None and micro > batch:
        raise ConfigError(
            f"data.micro_batch={micro} is larger than data.global_batch={batch}: "
            f"the share of one rank is at most {batch}"
        )
    try:
        options.check(config.parallel)
        virtual.check(config)
        combinations.check(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
