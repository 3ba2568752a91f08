"""Profiles of clusters: one YAML file each, with default options, modules and environment.

`--cluster NAME` reads `clusters/NAME.yaml` of the site, of the project and of the user
(`~/.config/rollcall/clusters/NAME.yaml`), whose values replace those before. Options on the command
line replace all of them. Jobs without `--cluster` use the profile named `default`, if there is one.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.config.yaml_values import read_texts
from rollcall.installation import SITE
from rollcall.launch.program.find import checkout_of
from rollcall.launch.submission import options
from rollcall.refusal import RefusedError

KEYS = ("options", "modules", "environment", "setup")
DEFAULT = "default"
OFF = ("false", "null", "")


class Profile(NamedTuple):
    """A cluster's profile."""

    words: tuple[str, ...]  # its options, as words of the command line
    setup: tuple[str, ...]  # shell lines of the job script


def users_folder() -> Path:
    """Return the folder of the user's profiles."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "rollcall" / "clusters"


def has_default() -> bool:
    """Whether there is a profile for jobs without `--cluster`."""
    return any((folder / f"{DEFAULT}.yaml").is_file() for folder in _folders())


def _folders() -> tuple[Path, ...]:
    return (SITE / "clusters", checkout_of(Path.cwd()) / "clusters", users_folder())


def load(name: str) -> Profile:
    """Return the profile of a cluster; raise RefusedError if it is wrong or does not exist."""
    folders = _folders()
    files = [path for folder in folders if (path := folder / f"{name}.yaml").is_file()]
    if not files:
        there = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        known = f"known profiles: {', '.join(there)}" if there else f"{folders[-1]} has none"
        known += "; `rollcall submit --discover` writes one"
        raise RefusedError(f"--cluster {name}: no such profile; {known}")
    merged: dict[str, Any] = {}
    for path in files:
        values = _read(path)
        for key in ("options", "environment"):
            merged[key] = merged.get(key, {}) | values.get(key, {})
        for key in ("modules", "setup"):
            merged[key] = values.get(key, merged.get(key, []))
    return Profile(tuple(as_words(merged["options"])), tuple(_setup(merged)))


def _read(path: Path) -> dict[str, Any]:
    values = read_texts(path, KEYS)
    for key, value in values.items():
        kind = dict if key in ("options", "environment") else list
        parts = value.values() if isinstance(value, dict) else value
        is_flat = key == "options" or all(isinstance(part, str) for part in parts)
        if not isinstance(value, kind) or not is_flat:
            what = "'name: value' lines" if kind is dict else "a list of texts"
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
            elif text not in OFF:
                words.append(f"--{name}={text}")
    return words


def _setup(values: dict[str, Any]) -> list[str]:
    lines = []
    if values["modules"]:
        lines.append("type -t module >/dev/null || source /etc/profile")
        lines.append(f"module load {shlex.join(values['modules'])} || exit")
    exports = [f"export {name}={shlex.quote(text)}" for name, text in values["environment"].items()]
    return [*lines, *exports, *values["setup"]]
