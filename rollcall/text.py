"""Helpers for command-line words and messages. No torch, and quick to import."""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def word(key: str, value: str) -> str:
    """Return the word that sets a key to a text, quoted where YAML would read another type."""
    plain = re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value.lower() not in _NOT_TEXT
    return f"{key}={value if plain else json.dumps(value)}"


_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """Return the part of a refusal that names the nearest known word, or an empty text."""
    match = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f", did you mean '{prefix}{match[0]}'?" if match else ""


def coloured(text: str, code: str) -> str:
    """Return a text in a colour, but not for a file or for somebody who wants no colours."""
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR")  # no-color.org
    return text if is_plain else f"\x1b[{code}m{text}\x1b[0m"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return the first names, and how many there are more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a configuration: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`."""
    return {
        f"{section}.{key}" if key else section: value
        for section, group in values.items()
        for key, value in (group.items() if isinstance(group, dict) else [("", group)])
    }


def size(count: float) -> str:
    """Return a number of bytes for people: three digits and a decimal unit, such as 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # what is not rounded to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Return a time for people, such as 2.3 days."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def markdown(rows: Sequence[Sequence[str]], wide: bool = False) -> list[str]:
    """Return the lines of a Markdown table, the first row being its head.

    With `wide`, a terminal shows it well, too: all columns but the last are as wide as their widest
    cell.
    """
    safe = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) * wide for column in zip(*safe, strict=True)]
    widths[-1] = 0
    head, *rest = safe
    line = ["-" * max(3, width) for width in widths]
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in (head, line, *rest)]
