"""Where options come from: a cluster's profile, SBATCH_* variables, the command line.

As for sbatch, a variable replaces a default, and an option on the command line replaces both.
`--cluster NAME` reads `clusters/NAME.yaml` of the site, of the project and of the user
(`~/.config/rollcall/clusters/NAME.yaml`), whose values replace those before. Jobs without
`--cluster` use the profile named `default`, if there is one.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollcall.cli.installation import SITE
from rollcall.config import trust
from rollcall.config.yaml_values import read_texts
from rollcall.launch.program.find import checkout_of
from rollcall.launch.scheduler import gpus, slurm
from rollcall.launch.scheduler.sbatch_options import ENVIRONMENT, FLAGS, ONE_OF
from rollcall.launch.submission import options
from rollcall.launch.submission.options import CommandLine, alternatives
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import note

KEYS: dict[str, type[Any]] = {"options": dict, "modules": list, "environment": dict, "setup": list}
"""The keys of a profile."""


def read(argv: Sequence[str], source: str = "command line") -> tuple[CommandLine, tuple[str, ...]]:
    """Parse a command line after the options of other places; return also the profile's setup."""
    asked = options.asked(argv)
    if "help" in asked or "-h" in takewhile("--".__ne__, argv):
        return options.read(argv), ()
    layers: list[tuple[str, list[str]]] = []
    setup: tuple[str, ...] = ()
    is_job = slurm.is_available() and "local" not in asked
    name = asked.get("cluster") or ("default" if is_job and _files("default") else None)
    if name:
        loaded, setup = load(name)
        layers.append((f"profile {name}", list(loaded)))
    if is_job:
        layers += [(name, [word]) for name, word in _variables(os.environ)]
    kept: list[str] = []
    origins = dict.fromkeys(map(_plain, asked), source)
    if gpus.of_resources(asked.get("gres", "")):
        origins.setdefault("gpus", source)
    for place, words in reversed(layers):
        free = [word for word in words if not any(map(origins.get, _rivals(word)))]
        origins |= dict.fromkeys(map(_name, free), place)
        if any(map(_is_gres_of_gpus, free)):
            origins["gpus"] = place
        kept = [*free, *kept]
    return options.read([*kept, *argv])._replace(origins=origins), setup


def _variables(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable of sbatch that is set, and its option as a word of the command line."""
    for variable, name in ENVIRONMENT.items():
        value = env.get(variable, "")
        if not value:
            continue
        if name in alternatives() or name == "job-name":
            advice = alternatives().get(name, "the job has the name of the run; use --name")
            note(f"{variable} has no effect: {advice}")
            continue
        word = f"--{name}" if name in FLAGS and name != "exclusive" else f"--{name}={value}"
        try:
            options.read([word])
        except RefusedError as error:
            raise RefusedError(f"{variable}: {error}") from None
        yield variable, word


def _rivals(word: str) -> set[str]:
    """Return the options that replace this one if they come from a place that counts more."""
    if (name := _name(word)) in options.LISTS:
        return set()
    also = "gpus" if _is_gres_of_gpus(word) else name
    return {name}.union(*(group for group in ONE_OF if also in group))


def _is_gres_of_gpus(word: str) -> bool:
    name, _, value = word.partition("=")
    return name == "--gres" and bool(gpus.of_resources(value))


def _name(word: str) -> str:
    return _plain(word.partition("=")[0])


def _plain(name: str) -> str:
    name = name.removeprefix("--")
    return "job-name" if name == "name" else name


def _folders() -> tuple[Path, ...]:
    of_user = trust.users_file().with_name("clusters")
    return (SITE / "clusters", checkout_of(Path.cwd()) / "clusters", of_user)


def _files(name: str) -> list[Path]:
    return [path for folder in _folders() if (path := folder / f"{name}.yaml").is_file()]


def load(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of a cluster's profile as words, and its lines for the job script."""
    if not (files := _files(name)):
        folders = _folders()
        there = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        known = f"known profiles: {', '.join(there)}" if there else f"{folders[-1]} has none"
        raise RefusedError(f"--cluster {name}: no such profile; {known}")
    merged: dict[str, Any] = {key: kind() for key, kind in KEYS.items()}
    for path in files:
        for key, value in _read(path).items():
            merged[key] = merged[key] | value if KEYS[key] is dict else value
    lines = [f"export {key}={shlex.quote(text)}" for key, text in merged["environment"].items()]
    if merged["modules"]:
        load_modules = f"module load {shlex.join(merged['modules'])} || exit"
        lines = ["type -t module >/dev/null || source /etc/profile", load_modules, *lines]
    return tuple(as_words(merged["options"])), (*lines, *merged["setup"])


def _read(path: Path) -> dict[str, Any]:
    values = read_texts(path, list(KEYS))
    for key, value in values.items():
        parts = value.values() if isinstance(value, dict) else value
        is_flat = key == "options" or all(isinstance(part, str) for part in parts)
        if not isinstance(value, KEYS[key]) or not is_flat:
            what = "'name: value' lines" if KEYS[key] is dict else "a list of texts"
            raise RefusedError(f"{path}: {key}: expected {what}, found '{value}'")
    for name in values.get("environment", {}):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise RefusedError(f"{path}: environment: '{name}' is not a valid variable name")
    try:
        options.read(list(as_words(values.get("options", {}))))
    except RefusedError as error:
        raise RefusedError(f"{path}: options: {error}") from None
    return values


def as_words(given: dict[str, Any]) -> list[str]:
    """Return options from YAML as words of the command line."""
    words = []
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            if text == "true":
                words.append(f"--{name}")
            elif text not in ("false", "null", ""):
                words.append(f"--{name}={text}")
    return words
