"""The keys of the schema as a table, and the JSON schema of a recipe file. No torch."""

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rollcall.config.schema import Config, OnResume, Section

TYPES = {str: "text", int: "integer", float: "number", bool: "true | false", types.NoneType: "null"}


class Key(NamedTuple):
    """A key with its dotted name, type, default and meaning."""

    name: str
    type: str
    default: Any
    meaning: str
    on_resume: OnResume  # what happens if a run is resumed with another value


def describe(section: Any = Config, prefix: str = "") -> Iterator[Key]:
    """Yield every key of a section, of the whole schema by default."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from describe(field.annotation, f"{prefix}{name}.")
        else:
            kind, meaning = _type_name(field.annotation), field.description or ""
            own = (rule for rule in field.metadata if isinstance(rule, OnResume))
            rule = next(own, section.ON_RESUME)
            yield Key(prefix + name, kind, field.default, meaning, rule)


def on_resume() -> dict[str, OnResume]:
    """Return what happens to each key, by dotted name, if a run is resumed with another value."""
    return {key.name: key.on_resume for key in describe()}


def sections() -> dict[str, str]:
    """Return the sections of the schema, each with one line of text."""
    fields = Config.model_fields.items()
    found = {name: field.annotation for name, field in fields if _is_section(field.annotation)}
    return {name: (section.__doc__ or "").strip() for name, section in found.items()}


def json_schema() -> str:
    """Return the JSON schema of a recipe file, by which editors complete and check YAML."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is dict:
        return "mapping"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    return TYPES[annotation]
