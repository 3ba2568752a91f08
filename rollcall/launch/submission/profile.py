"""Profiles of clusters: one YAML file each, with default options, modules and environment.

`--cluster NAME` reads `clusters/NAME.yaml` of the site, of the project and of the user
(`~/.config/rollcall/clusters/NAME.yaml`), whose values replace those before. Options on the command
line replace all of them. Jobs without `--cluster` use the profile named `default`, if there is one.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from rollcall.cli.installation import SITE
from rollcall.config import trust
from rollcall.config.yaml_values import read_texts
from rollcall.launch.program.find import checkout_of
from rollcall.launch.submission import options
from rollcall.messages.refusal import RefusedError

KEYS: dict[str, type[Any]] = {"options": dict, "modules": list, "environment": dict, "setup": list}
DEFAULT = "default"


def has_default() -> bool:
    """Whether there is a profile for jobs without `--cluster`."""
    return any((folder / f"{DEFAULT}.yaml").is_file() for folder in _folders())


def _folders() -> tuple[Path, ...]:
    of_user = trust.users_file().with_name("clusters")
    return (SITE / "clusters", checkout_of(Path.cwd()) / "clusters", of_user)


def load(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of a cluster's profile as words, and its lines for the job script."""
    folders = _folders()
    files = [path for folder in folders if (path := folder / f"{name}.yaml").is_file()]
    if not files:
        there = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        known = f"known profiles: {', '.join(there)}" if there else f"{folders[-1]} has none"
        raise RefusedError(f"--cluster {name}: no such profile; {known}")
    merged: dict[str, Any] = {key: kind() for key, kind in KEYS.items()}
    for path in files:
        for key, value in _read(path).items():
            merged[key] = merged[key] | value if KEYS[key] is dict else value
    return tuple(as_words(merged["options"])), tuple(_setup(merged))


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


def _setup(values: dict[str, Any]) -> list[str]:
    lines = []
    if values["modules"]:
        lines.append("type -t module >/dev/null || source /etc/profile")
        lines.append(f"module load {shlex.join(values['modules'])} || exit")
    exports = [f"export {name}={shlex.quote(text)}" for name, text in values["environment"].items()]
    return [*lines, *exports, *values["setup"]]
