"""Read a recipe and `key=value` words into a checked Config. No torch.

An invalid key or value raises ConfigError before any process group exists.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rollcall.config import arguments, checks, refusals, trust, yaml_values
from rollcall.config.keys import describe, sections
from rollcall.config.refusals import about_option, is_given
from rollcall.config.schema import Config, ConfigError, entries
from rollcall.messages.text import did_you_mean, dotted
from rollcall.system.files import is_there

RECIPES = Path(__file__).parent / "recipes"
SHAPES: dict[str, Any] = yaml_values.table(__file__, "shapes.yaml")
OPTIONS = ("--ranks", "--help", "--print-config", "--print-schema")  # of `rollcall train`
ENTRIES = ("train.metrics", "train.callbacks", "log.to")
"""Keys with several entries, which may be written as text."""
REMOVED = (
    *(("parallel", "static_graph", False), ("checkpoint", "auto_interval", False)),
    *(("checkpoint", "mtbf_hours", 24), ("faults", "replay_snapshots", ...)),
)
"""Keys of earlier versions, in files of their runs; these values (...: any) changed nothing."""


def recipes() -> list[str]:
    """Return the names of the recipes that come with rollcall."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parse(words: Sequence[str], is_draft: bool = False) -> tuple[str, Config]:
    """Read `[recipe or file] [key=value …]`; return the recipe's name and the configuration.

    The word without `=` is a recipe or a YAML file (default: digits); each of the others sets one
    key to a YAML value. ConfigError: a recipe, key or file is unknown, a value has the wrong type
    or is out of range, or keys contradict each other.
    """
    source = _source(words)
    values = _read(source)
    _assign_all(values, words)
    _take_shape(values, words)
    given = [word.partition("=")[0] for word in words if "=" in word]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(refusals.explain(error.errors(), source, given)) from None
    try:
        checks.check(config, {word.partition("=")[0] for word in words})
        wanted = None if is_draft or config.data.path else checks.DATA_PATHS.get(config.data.name)
        if wanted:
            raise ConfigError(f"data.name={config.data.name} needs data.path: {wanted}")
        trusted = trust.check(arguments.named_code(config), _path(source), words) or None
        run, data = config.run.model_copy(update={"trust": trusted}), config.data
        if data.name == "jsonl" and (folder := tokenizer_folder(config)):
            data = data.model_copy(update={"args": {**data.args, "tokenizer": folder}})
        config = config.model_copy(update={"run": run, "data": data})
        return Path(source).stem, arguments.complete(config)
    except ConfigError as error:
        key = re.split(r"[^\w.]", str(error), maxsplit=1)[0]
        is_of_file = is_given(key, _leaves(_read(source))) and not is_given(key, given)
        raise ConfigError(f"{source}: {error}" if is_of_file else str(error)) from None


def _take_shape(values: dict[str, Any], words: Sequence[str]) -> None:
    """Add the numbers of `model.size`, which replace the file's only if a word names the size."""
    model: Any = values.get("model")
    shape = SHAPES.get(str(model.get("size"))) if isinstance(model, dict) else None
    if shape:
        given: dict[str, Any] = {}
        _assign_all(given, words)
        named: Any = given.get("model", {})
        known = named if "size" in named else model
        values["model"] = model | {key: number for key, number in shape.items() if key not in known}


def tokenizer_folder(config: Config) -> str | None:
    """Return data.args.tokenizer, or model.init, model.args.base or token files that have one."""
    tokens = config.data.path if config.data.name == "tokens" else None
    names = (config.model.init, config.model.args.get("base"), tokens)
    folders = (str(name or "") for name in names)
    filled = (path for path in folders if path and any(Path(path).expanduser().glob("tokenizer*")))
    return config.data.args.get("tokenizer") or next(filled, None)


def origins(words: Sequence[str]) -> dict[str, str]:
    """Return the origin of each key's and each argument's value, for words that `parse` accepts."""
    source = _source(words)
    origin = dict.fromkeys((name for name, *_ in describe()), "default")
    origin |= dict.fromkeys(_leaves(_read(source)), str(_path(source)))
    given: dict[str, Any] = {}
    _assign_all(given, words)
    _take_shape(given, words)
    return origin | dict.fromkeys(_leaves(given), "command line")


def _leaves(values: dict[str, Any]) -> list[str]:
    names = []
    for key, value in dotted(values).items():
        names += [key, *(f"{key}.{arg}" for arg in (value if isinstance(value, dict) else ()))]
    return names


def _source(words: Sequence[str]) -> str:
    if code := next((word for word in words if word.endswith(".py") and "=" not in word), ""):
        raise ConfigError(
            f"{code} is code, not a recipe: `rollcall submit -- {code}` runs a script, and "
            f"model.name={Path(code).stem}:NAME trains a model in it"
        )
    for number, word in enumerate(words):
        if word.startswith("-"):
            hint = did_you_mean(word, OPTIONS, 0.8)
            advice = about_option(words[number:]) or "set keys as key=value, see --help"
            raise ConfigError(f"unknown option {word}{hint or f'; {advice}'}")
        after = words[number + 1] if word.endswith("=") and number + 1 < len(words) else ""
        is_value = bool(after) and not is_file(after) and after not in recipes()
        if word.startswith("=") or (is_value and "=" not in after and after[0] != "-"):
            raise ConfigError(f"'{word}': expected key=value without spaces around '='")
    sources = [word for word in words if "=" not in word]
    if "help" in sources:
        raise ConfigError("'help': write --help, or --help KEY for one key such as optim.lr")
    if len(sources) > 1:
        got = f"got '{sources[0]}' and '{sources[1]}'"
        keys = (re.split("[: ]+", word.lstrip("~+"), maxsplit=1) for word in sources[1:])
        keys = (key for key in keys if key[0].partition(".")[0] in sections())
        given = [f"{key[0]}={''.join(key[1:]) or '...'}" for key in keys]
        given += [f"--{word}" for word in sources if f"--{word}" in OPTIONS]
        hint = f", did you mean {given[0]}?" if given else "; leave one of them out"
        raise ConfigError(f"expected one recipe or file and key=value pairs, {got}{hint}")
    return sources[0] if sources else "digits"


def is_file(word: str) -> bool:
    """Return True for a word that names a YAML file, not a recipe or a key."""
    return "=" not in word and (word.endswith((".yaml", ".yml")) or "/" in word)


def _path(source: str) -> Path:
    return Path(source) if is_file(source) else RECIPES / f"{source}.yaml"


def _read(source: str) -> dict[str, Any]:
    path = _path(source)
    run = Path(source) if is_there(Path(source)) and Path(source).is_dir() else Path("runs", source)
    if not (is_there(path) and path.is_file()) and is_there(run / "config.yaml"):
        how = f"write its recipe and keys, which {run}/config.yaml has, and run.name={run.name}"
        raise ConfigError(f"{source} is a run, not a recipe; to continue it, {how}")
    if not is_there(path):
        raise ConfigError(_not_found(source))
    values = yaml_values.read(path)
    for section, key, value in REMOVED:
        group = values.get(section)
        if isinstance(group, dict) and key in group and value in (..., group[key]):
            del group[key]
    if values or not path.is_file():
        return values
    raise ConfigError(f"{path}: the file sets no key; expected lines such as train: {{steps: 9}}")


def _not_found(source: str) -> str:
    if is_file(source):
        path = Path(source)
        hint = did_you_mean(source, (str(other) for other in path.parent.glob("*.y*ml")), 0.75)
        hint = hint or f"; expected the path of a YAML file, or a recipe: {', '.join(recipes())}"
        if path.stem in recipes():
            hint = f"; '{path.stem}' without directory and suffix is a recipe"
        return f"{source}: no such file{hint}"
    if Path(f"{source}.yaml").is_file():
        return f"unknown recipe '{source}', did you mean './{source}.yaml'?"
    name, *value = re.split("[: ]+", source, maxsplit=1)
    if value and name in {item.name for item in describe()}:
        return f"'{source}': expected key=value, here {name}={value[0]}"
    if re.fullmatch(r"[\w.]+:\w+", source):
        return f"'{source}' is not a recipe; write model.name={source} or data.name={source}"
    if source in {item.name for item in describe()}:
        return f"'{source}' is a key; write {source}=..., or --help {source} to read about it"
    if "." in source and (hint := did_you_mean(source, (item.name for item in describe()), 0.8)):
        return f"'{source}': expected a recipe, not a key{hint} --help KEY explains a key"
    choices = f"; choose {', '.join(recipes())}, or a file that ends in .yaml"
    return f"unknown recipe '{source}'{did_you_mean(source, recipes()) or choices}"


def _assign_all(values: dict[str, Any], words: Sequence[str]) -> None:
    texts = {item.name for item in describe() if item.type in ("text", "text | null")}
    for number, word in enumerate(words):
        name, equals, text = word.partition("=")
        if not equals:
            continue
        lost = next((word for word in words[:number] if word.startswith(f"{name}.")), "")
        if lost and ("." in name or text.startswith("{")):  # no section, which is refused below
            raise ConfigError(f"{word} replaces {lost}, which stands before it; write it first")
        if re.search("[ ,]", name):
            advice = "write the words apart, without quotes around several of them"
            if not re.search("[ ,]", name.strip()):
                advice = f"write {name.strip()}={text.strip()}, without spaces"
            raise ConfigError(f"'{word}': expected key=value; {advice}")
        try:
            value = yaml_values.load(text)
        except yaml.YAMLError as error:
            value, why = text, getattr(error, "problem", None) or "put it in quotes"
            if not (text.startswith("*") and name in texts):  # of files; in YAML an alias
                raise ConfigError(f"{word}: the value is not valid YAML: {why}") from None
        if isinstance(value, int | float) and name in texts:
            value = text  # a shell takes quotes away
        *sections, last = name.split(".")
        group = values
        for depth, section in enumerate(sections, 1):
            if ".".join(sections[:depth]) in ENTRIES:
                group[section] = entries(group.get(section, {}))
            group = group.setdefault(section, {})
            if not isinstance(group, dict):
                key = ".".join(sections[:depth])
                raise ConfigError(f"{word}: {key} is a key without parts; write {key}={text}")
        group[last] = value
