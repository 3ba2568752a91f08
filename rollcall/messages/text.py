"""Helpers for command-line words and messages. No torch; quick to import."""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def word(key: str, value: str) -> str:
    """Return the word that sets a key to a text, quoted where YAML would read another type."""
    others = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
    plain = re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value.lower() not in others
    return f"{key}={value if plain else json.dumps(value)}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """Return the end of a refusal that names the nearest known word; empty if none is near."""
    import difflib  # here: only mistakes need it

    words = list(known)
    swapped = [other for other in words if sorted(other.lower()) == sorted(word.lower())]
    match = swapped or difflib.get_close_matches(word, words, 1, cutoff)
    return f", did you mean '{prefix}{match[0]}'?" if match else ""


def coloured(text: str, code: str) -> str:
    """Return a text in a colour, unless the output is a file or NO_COLOR is set."""
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR")  # no-color.org
    return text if is_plain else f"\x1b[{code}m{text}\x1b[0m"


def is_first_rank() -> bool:
    """Return True on rank 0, and in a process that no launcher started, also without torch."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def announce(text: str) -> None:
    """Tell a person at a terminal, on rank 0, what takes a while; a file gets nothing."""
    if sys.stderr.isatty() and is_first_rank():
        print(f"rollcall: {text}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print something that the user might not expect."""
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"rollcall: note: {text}", file=sys.stderr, flush=True)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Join the first names, and count the others: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: "1 rank", "2 ranks"."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a configuration: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`."""
    return {
        f"{section}.{key}" if key else section: value
        for section, group in values.items()
        for key, value in (group.items() if isinstance(group, dict) else [("", group)])
    }


def figure(value: float) -> str:
    """Return a number for people: four significant digits, and whole thousands."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def fixed(value: float) -> str:
    """Return a number with four decimals; a small one that they would hide, with four digits."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def size(count: float) -> str:
    """Return a number of bytes for people: three digits and a decimal unit, such as 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # three digits do not round it to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def clock(seconds: float) -> str:
    """Return a time since 1970 as date and time for people; empty if it cannot be one."""
    with contextlib.suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""


def duration(seconds: float) -> str:
    """Return a time for people, such as 2 days 7 h."""
    if not math.isfinite(seconds):
        return "unknown"
    units = (("days", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for unit, length, smaller, part in units:
        if seconds >= 2 * length:
            whole, rest = divmod(round(seconds / part), length // part)
            return f"{whole} {unit} {rest} {smaller}" if rest else f"{whole} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return the lines of a table; `right` aligns all columns but the first as numbers."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return ["  ".join([row[0].ljust(first), *map(pad, row[1:], others)]).rstrip() for row in rows]


def table_in(path: Path) -> list[list[str]]:
    """Return the rows of a Markdown table that fills a file, without its head."""
    return [line[2:-2].split(" | ") for line in path.read_text().splitlines()[2:]]


def markdown(rows: Sequence[Sequence[str]], wide: bool = False) -> list[str]:
    """Return the lines of a Markdown table with a head; a `wide` one is padded for a terminal."""
    safe = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) if wide else 0 for column in zip(*safe, strict=True)]
    widths[-1] = 0
    head, *rest = safe
    line = ["-" * max(3, width) for width in widths]
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in (head, line, *rest)]
