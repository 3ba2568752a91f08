"""The fabric between the hosts, and what NCCL needs for it (fabrics.toml). No torch."""

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SYSROOT = os.environ.get("ROLLCALL_SYSROOT", "")
"""Stands before the paths of /proc, /sys and /etc; only tests set it."""


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Return fabrics.toml, which explains itself."""
    return tomllib.loads(Path(__file__).with_name("fabrics.toml").read_text())


def recognise(root: str = SYSROOT) -> str:
    """Return the fastest fabric of this host, by its name in the table."""
    for name, entry in table().items():
        for pattern, text in entry.get("files", {}).items():
            if any(re.search(text, _read(path)) for path in Path(root or "/").glob(pattern)):
                return name
    return "tcp"


def configured(env: Mapping[str, str], root: str = SYSROOT) -> dict[str, str]:
    """Return the settings in NCCL's configuration files; the user's come before the system's."""
    of_user = env.get("NCCL_CONF_FILE") or f"{env.get('HOME', '')}/.nccl.conf"
    text = "\n".join(_read(Path(f"{root}{path}")) for path in ("/etc/nccl.conf", of_user))
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def settings(env: Mapping[str, str], root: str = SYSROOT) -> dict[str, str]:
    """Return the variables that the table has for this fabric and that nobody has set."""
    wanted = table()[recognise(root)].get("set", {})
    given = {**env, **configured(env, root)}
    return {name: entry["value"] for name, entry in wanted.items() if name not in given}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # a directory, a link without a speed
        return ""
