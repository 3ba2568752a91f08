"""`key=value` words as train reads them: the value is YAML."""

from __future__ import annotations

import json
import re


def word(key: str, value: str) -> str:
    """The word that sets a key to this text, quoted where YAML would read something else in it."""
    plain = re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value.lower() not in _NOT_TEXT
    return f"{key}={value if plain else json.dumps(value)}"


_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
