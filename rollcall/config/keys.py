"""The keys of the schema as a table, and the JSON schema of a recipe file. No torch."""

import ast
import functools
import inspect
import itertools
import json
import types
import typing
from collections.abc import Iterator
from string import Template
from typing import Any, Literal, NamedTuple

from rollcall.config import catalog, schema

TYPES = {str: "text", int: "integer", float: "number", bool: "true | false", types.NoneType: "null"}


class Key(NamedTuple):
    """A key with its dotted name, type and default."""

    name: str
    type: str
    default: Any
    on_resume: schema.OnResume  # effect of another value on a resumed run
    section: str  # its class in the schema

    @property
    def meaning(self) -> str:
        """Its docstring in the schema."""
        return _meanings()[self.section, self.name.rpartition(".")[2]]


def describe(section: Any = schema.Config, prefix: str = "") -> Iterator[Key]:
    """Yield every key of a section, of the whole schema by default."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from describe(field.annotation, f"{prefix}{name}.")
        else:
            rules = (rule for rule in field.metadata if isinstance(rule, schema.OnResume))
            rule = next(rules, section.ON_RESUME)
            kind = _type_name(field.annotation)
            yield Key(prefix + name, kind, field.default, rule, section.__name__)


def on_resume() -> dict[str, schema.OnResume]:
    """Return the effect of resuming a run with another value of each key, by its dotted name."""
    return {key.name: key.on_resume for key in describe()}


def sections() -> dict[str, str]:
    """Return the sections of the schema, each with one line of text."""
    kinds = {name: field.annotation for name, field in schema.Config.model_fields.items()}
    return {name: (kind.__doc__ or "").strip() for name, kind in kinds.items() if _is_section(kind)}


def json_schema() -> str:
    """Return the JSON schema of a recipe file, with which editors complete and check YAML."""
    whole = schema.Config.model_json_schema()
    groups = {"Config": whole, **whole["$defs"]}
    for (section, name), meaning in _meanings().items():
        groups[section]["properties"][name]["description"] = meaning
    return json.dumps(whole, indent=2) + "\n"


@functools.cache
def _meanings() -> dict[tuple[str, str], str]:
    """Return the text below each field of the schema, by its class and name."""
    meanings = {}
    names = {name: ", ".join(table) for name, table in catalog.TABLES.items()}
    nodes = ast.parse(inspect.getsource(schema)).body
    for section in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for pair in itertools.pairwise(section.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    text = Template(" ".join(text.split())).safe_substitute(names)
                    meanings[section.name, name] = text
    return meanings


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, schema.Section)


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
