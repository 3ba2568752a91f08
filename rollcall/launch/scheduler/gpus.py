"""GPUs as Slurm writes them: `4`, `a100:4`, `gpu:a100:4`, `gres/gpu=4`, and lists of these."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

EXPECTED = "expected a number of GPUs, or a type and a number such as a100:4"


def of_option(text: str) -> dict[str, int]:
    """Return the GPUs of --gpus-per-node by type, "" for any; raise ValueError at another text."""
    if not re.fullmatch(r"([^:,=]+:)?0*[1-9]\d*(,[^:,=]+:0*[1-9]\d*)*", text):
        raise ValueError(f"{EXPECTED}, not '{text}'")
    return _add_up(_entry(part) for part in text.split(","))


def of_resources(text: str) -> dict[str, int]:
    """Return the GPUs among other resources, as --gres, --tres-per-task and sinfo list them."""
    plain = re.sub(r"\([^)]*\)", "", text)  # sinfo adds the sockets: gpu:4(S:0-1)
    entries = (re.fullmatch(r"(?:gres[/:])?gpu(?:[:=](.+))?", part) for part in plain.split(","))
    return _add_up(_entry(entry[1] or "1") for entry in entries if entry)


def per_node(gpus_per_node: str | None, options: Mapping[str, str | None]) -> dict[str, int]:
    """Return the GPUs that a job has on each node, by type; empty without GPUs."""
    if gpus_per_node:
        return of_option(gpus_per_node)
    listed = (options.get(name) for name in ("gres", "tres-per-task"))
    found = _add_up(of_resources(text) for text in listed if text)
    return {kind: count for kind, count in found.items() if count}  # gpu:0 asks for none


def _entry(text: str) -> dict[str, int]:
    kind, _, count = text.replace("=", ":").rpartition(":")
    return {kind: int(count)} if count.isdecimal() else {text: 1}


def _add_up(entries: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for entry in entries:
        total.update(entry)
    return dict(total)
