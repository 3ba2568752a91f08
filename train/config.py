"""What may a user ask for? One typed schema, filled from a recipe and `key=value` words. No torch.

Every key is a field below, with its type, default and meaning; `python -m train --help` and
`recipes/schema.json` are generated from the same fields. A wrong key or value raises ConfigError
before any process group exists.
"""

from __future__ import annotations

import difflib
import json
import os
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

# Scanning every installed package for pydantic plugins costs a sixth of the start of a command.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from train.parallel import options
from train.parallel.mesh import PRESETS, fit

RECIPES = Path(__file__).parent / "recipes"


class ConfigError(ValueError):
    """A user's request that cannot be met; the message says what was expected and what to do."""


class Section(BaseModel):
    """A group of keys: unknown ones are refused, values do not change once they are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Run(Section):
    """Where a run keeps what it writes."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="name of the run and of its directory; the same name resumes the same run "
        "(default: recipe, date and time)",
    )
    root: str = Field(default="runs", min_length=1, description="directory that holds the runs")


class Data(Section):
    """What the model learns from."""

    name: str = Field(default="digits", description="digits, mnist, text, package.module:attribute")
    root: str = Field(
        default="datasets",
        min_length=1,
        description="directory of downloaded data, shared by the ranks",
    )
    context: int = Field(default=128, ge=1, description="bytes of a sample of text")
    global_batch: int = Field(default=64, ge=1, description="samples per step, over all ranks")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples per forward and backward on one rank; gradients accumulate over as "
        "many as the rank's share needs (default: the whole share at once)",
    )


class Model(Section):
    """What is trained."""

    name: str = Field(default="cnn", description="cnn, mlp, gpt, or package.module:attribute")
    hidden: int = Field(default=128, ge=1, description="width of the hidden layer; of gpt's blocks")
    layers: int = Field(default=4, ge=1, description="blocks of gpt")
    heads: int = Field(default=4, ge=1, description="heads of gpt's attention")
    kv_heads: int = Field(default=2, ge=1, description="heads of keys and values that they share")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="probability of dropping a hidden unit"
    )


class Optim(Section):
    """How a step changes the weights."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adamw", description="the optimizer")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay (for adamw decoupled)")
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="momentum of sgd; the others ignore it"
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="learning rate after the warm-up; cosine falls to zero at the end",
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from zero")
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient (default: no clipping)"
    )


class Parallel(Section):
    """How the model is spread over the ranks."""

    strategy: Literal[
        "single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline"
    ] = Field(
        default="ddp",
        description="single: one rank; dp: the GPUs of one process; ddp: replicas; zero1, zero2, "
        "zero3: optimizer state, gradients, weights in shards; hsdp: shards inside a node, "
        "replicas between nodes; tensor: cut layers; pipeline: stages of layers",
    )
    mesh: str | None = Field(
        default=None,
        description="degrees in place of the strategy's: shard=rest,tensor=2 (docs/parallel.md)",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(default="1f1b", description="of pipeline stages")
    offload: bool = Field(default=False, description="shards lie in host memory, not on the GPU")
    bucket_mb: float | None = Field(
        default=None, gt=0, description="MiB of gradients that ddp sends at once (default: torch's)"
    )
    static_graph: bool = Field(default=False, description="ddp: all steps use the same weights")
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none", description="how ddp packs gradients; all but none change the result"
    )

    @property
    def mesh_text(self) -> str:
        """The mesh as text: the user's, or the strategy's own."""
        return PRESETS[self.strategy].mesh if self.mesh is None else self.mesh

    @property
    def stage(self) -> int:
        """What shards divide: 1 optimizer state, 2 gradients too, 3 weights too."""
        return PRESETS[self.strategy].stage

    def degrees(self, world_size: int, node_size: int) -> dict[str, int]:
        """The degree of each dimension of the mesh.

        Args:
            world_size: ranks there are.
            node_size: ranks of one node.

        Raises:
            ConfigError: the mesh does not fit.
        """
        try:
            return fit(self.mesh_text, world_size, node_size)
        except ValueError as error:
            key = f"strategy={self.strategy}" if self.mesh is None else f"mesh={self.mesh}"
            raise ConfigError(f"parallel.{key} {error}") from None


class Train(Section):
    """How long to train."""

    epochs: float = Field(default=10, gt=0, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="stop after this many steps instead (default: by epochs)"
    )
    evaluate_every: float | None = Field(
        default=None, gt=0, description="epochs between evaluations (default: only at the end)"
    )


class Checkpoint(Section):
    """When the state of the run is saved."""

    every: int | None = Field(
        default=100,
        ge=1,
        description="steps between checkpoints; null saves only at the end and on a stop",
    )
    keep: int = Field(default=2, ge=1, description="how many of the newest checkpoints stay")


class Log(Section):
    """What is reported, and how often."""

    every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")


class Config(Section):
    """Everything a run was asked for."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="start of all randomness of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes the GPUs where there are any"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="number format of forward and backward; the weights stay fp32"
    )
    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def to_yaml(self) -> str:
        """The complete configuration as YAML, in the order of the schema."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


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
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"there is no option {word}; keys are set as key=value, see --help")
    sources = [word for word in words if "=" not in word]
    if len(sources) > 1:
        raise ConfigError(
            f"'{sources[1]}' is neither a key=value pair nor a second recipe: one recipe or file "
            f"is expected ('{sources[0]}' is the first), then key=value pairs"
        )
    source = sources[0] if sources else "digits"
    values = _read(source)
    for word in words:
        if "=" in word:
            _assign(values, word)
    return Path(source).stem, _build(values, source)


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
    if isinstance(annotation, types.UnionType):
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return {str: "text", int: "integer", float: "number", bool: "true | false"}[annotation]


def _read(source: str) -> dict[str, Any]:
    is_file = source.endswith((".yaml", ".yml")) or "/" in source
    path = Path(source) if is_file else RECIPES / f"{source}.yaml"
    try:
        values = yaml.load(path.read_text(), yaml.CSafeLoader)
    except FileNotFoundError:
        if is_file:
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
    return f"{source}: {key}: {problem}, not {item['input']!r}"


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
    except ValueError as error:
        raise ConfigError(str(error)) from None
