"""Roles of ranks, such as parameter servers: `chief,ps:2,worker:3,evaluator`, in order of rank."""

import re
from collections.abc import Sequence

EXPECTED = "expected chief, ps, worker or evaluator, each once, such as chief,ps:2,worker:3"


def of_ranks(text: str, ranks: int | None = None) -> list[str]:
    """Return the role of each of a number of ranks; raise ValueError if the text says another."""
    names: list[str] = []
    for word in text.split(","):
        match = re.fullmatch(r"(chief|evaluator|(?:ps|worker)(?::([1-9]\d{0,4}))?)", word)
        name = word.partition(":")[0]
        if match is None or name in names:
            raise ValueError(f"{EXPECTED}; not '{word}'")
        names += [name] * int(match[2] or 1)
    if not awaited(names):
        raise ValueError(f"{text} never ends: add a chief or workers")
    if ranks not in (None, len(names)):
        raise ValueError(f"{text} has {len(names)} ranks, and the run has {ranks}")
    return names


def awaited(roles: Sequence[str]) -> list[int]:
    """Return the ranks to wait for: servers never end, nor do TensorFlow's workers with a chief."""
    names = ("chief" if "chief" in roles else "worker", "evaluator")
    return [rank for rank, role in enumerate(roles) if role in names]
