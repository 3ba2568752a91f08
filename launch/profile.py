"""What does a site need? One YAML file per cluster: defaults for options, modules, environment.

`--cluster NAME` reads `clusters/NAME.yaml` of the project and, over it,
`~/.config/rollcall/clusters/NAME.yaml` of the user: what a person says of their own account wins.
The command line wins over both.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launch import options
from launch.program import checkout_of

KEYS = ("options", "modules", "environment", "setup")
OFF = ("false", "null", "")


class ProfileError(options.OptionError):
    """A profile that is not there or cannot be read so; the message names the file and the key."""


class Profile(NamedTuple):
    """A cluster's profile.

    Attributes:
        words: its options, as they would stand on the command line.
        setup: shell lines for the job script.
    """

    words: tuple[str, ...]
    setup: tuple[str, ...]


def users_folder() -> Path:
    """Where a user's own profiles are."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "rollcall" / "clusters"


def load(name: str) -> Profile:
    """The profile of a cluster.

    Raises:
        ProfileError: there is none, or what stands in it is wrong.
    """
    folders = (checkout_of(Path.cwd()) / "clusters", users_folder())
    files = [path for folder in folders if (path := folder / f"{name}.yaml").is_file()]
    if not files:
        there = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        known = f"those here are {', '.join(there)}" if there else f"there is none in {folders[1]}"
        raise ProfileError(
            f"--cluster {name}: there is no such profile; {known}; submit.py --discover writes one"
        )
    merged: dict[str, Any] = {}
    for path in files:
        values = _read(path)
        for key in ("options", "environment"):
            merged[key] = merged.get(key, {}) | values.get(key, {})
        for key in ("modules", "setup"):
            merged[key] = values.get(key, merged.get(key, []))
    return Profile(tuple(as_words(merged["options"])), tuple(_setup(merged)))


def _read(path: Path) -> dict[str, Any]:
    try:
        # Every value is text: YAML would read 2:00:00 as 7200.
        values = yaml.load(path.read_text(), yaml.CBaseLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProfileError(f"{path}: expected 'key: value' lines with {', '.join(KEYS)}")
    values = {key: value for key, value in values.items() if value != ""}
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f", did you mean '{near[0]}'?" if near else f"; the keys are {', '.join(KEYS)}"
            raise ProfileError(f"{path}: unknown key '{key}'{hint}")
        kind = dict if key in ("options", "environment") else list
        if not isinstance(value, kind):
            what = "'name: value' lines" if kind is dict else "a list"
            raise ProfileError(f"{path}: {key}: expected {what}, found '{value}'")
    for name in values.get("environment", {}):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ProfileError(f"{path}: environment: '{name}' cannot be a variable's name")
    try:
        options.read(list(as_words(values.get("options", {}))))
    except options.OptionError as error:
        raise ProfileError(f"{path}: options: {error}") from None
    return values


def as_words(given: dict[str, Any]) -> list[str]:
    """Options from YAML as they would stand on the command line."""
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
    for name, value in values["environment"].items():
        lines.append(f"export {name}={shlex.quote(value)}")
    return [*lines, *values["setup"]]
