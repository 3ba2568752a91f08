"""`python -m train checkpoint list|show|verify|diff|export|convert|bench`: look into checkpoints.

Torch is imported only to compare, to export and to measure. Nothing that lies in a checkpoint is
ever run, whoever wrote it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.checkpoint import manifest, shelf, verify
from train.checkpoint.manifest import Damaged
from train.config import ConfigError
from train.run import named

SHOWN = 10  # tensors that diff names
ANYWHERE = """\
Nothing is to be converted. A checkpoint knows tensors by their global names and shapes, not by a
mesh: any strategy on any number of ranks loads it as it is, each rank reading what it needs."""


def main(words: Sequence[str]) -> int:
    """Do what the command line asks; return the exit code."""
    arguments = _parser().parse_args(words)
    try:
        code: int = arguments.command(arguments)
    except (ConfigError, Damaged, OSError) as error:
        print(f"checkpoint: error: {_plain(str(error))}", file=sys.stderr)
        return 2
    return code


def _list(arguments: argparse.Namespace) -> int:
    for path in arguments.paths:
        directory = _shelf(path)
        print(f"{directory}:")
        rows: list[tuple[str, ...]] = [("step", "saved", "size", "ranks", "torch", "")]
        for _, place in sorted(shelf.published(directory).items()):
            rows.append(_row(place))
        for place in shelf.refused(directory):
            rows.append((place.name, "", "", "", "", "refused as damaged"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print(f"  {_plain(line)}".rstrip())
    return 0


def _row(path: Path) -> tuple[str, ...]:
    try:
        stored = manifest.read(path)
    except (Damaged, ConfigError) as error:
        return (path.name, "", "", "", "", f"damaged: {error}")
    facts = stored.facts
    try:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_number(facts.get("time"))))
    except (OverflowError, ValueError, OSError):
        saved = "?"
    worth = ", ".join(f"{name} {_number(value):.4g}" for name, value in _metrics(facts).items())
    ranks = str(facts.get("world_size"))
    return (str(stored.step), saved, _size(stored.nbytes), ranks, str(facts.get("torch")), worth)


def _show(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)
    stored = manifest.read_named(path)
    print(f"{path}: {len(stored.tensors)} tensors, {_size(stored.nbytes)}")
    for name, fact in stored.facts.items():
        print(f"  {_plain(name)}: {_plain(json.dumps(fact))}")
    for name, size in stored.files.items():
        print(f"  {name}: {size} bytes")
    for tensor in stored.tensors.values():
        shape = "×".join(map(str, tensor.shape)) or "one number"
        print(f"  {_plain(tensor.name)}: {tensor.dtype} {shape}, {len(tensor.pieces)} pieces")
    for name, (_, value) in stored.values.items():
        print(f"  {_plain(name)} = {_plain(json.dumps(value))}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    code = 0
    for path in arguments.paths:
        places = [path] if _is_checkpoint(path) else sorted(shelf.published(_shelf(path)).values())
        for place in places:
            found = verify.problems(place)
            if place != path and not place.exists():  # a training has removed it meanwhile
                continue
            print(f"{place}: {'damaged' if found else 'whole'}")
            for problem in found:
                print(f"  {_plain(problem)}")
            code = code or bool(found)
    return int(code)


def _diff(arguments: argparse.Namespace) -> int:
    from train.checkpoint.compare import differences

    first, second = _checkpoint(arguments.first), _checkpoint(arguments.second)
    found = differences(first, second)
    for line in found[:SHOWN]:
        print(_plain(line))
    if len(found) > SHOWN:
        print(f"and {len(found) - SHOWN} more")
    if not found:
        print("every tensor and value is equal to the last bit")
    return int(bool(found))


def _export(arguments: argparse.Namespace) -> int:
    from train.checkpoint import export

    path, target = _checkpoint(arguments.path), arguments.target
    write = {".safetensors": export.to_safetensors, ".pt": export.to_torch}.get(target.suffix)
    if write is None:
        raise ConfigError(f"{target}: expected a name that ends in .safetensors or .pt")
    with manifest.naming(path):
        count = write(path, target, None if arguments.all else "model")
    print(f"{target}: {count} tensors of {path}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)
    stored = manifest.read_named(path)
    facts = stored.facts
    mesh = f"{facts.get('world_size')} ranks, mesh {facts.get('mesh') or 'none'}"
    print(f"{path} was written by {_plain(mesh)}.\n{ANYWHERE}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from train.checkpoint import bench

    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.directory) as directory:
        sizes = arguments.megabytes, arguments.repeats
        print(bench.run(*sizes, Path(directory), arguments.device))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train checkpoint", description="Look into checkpoints; nothing is run."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = "run directory, a name in runs/, or the directory of one checkpoint"

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function)
        return added

    for name, function, text in (
        ("list", _list, "the checkpoints of runs"),
        ("verify", _verify, "read every byte and name each damaged file; exit code 1 if any"),
    ):
        command(name, function, text).add_argument("paths", type=_place, nargs="+", help=where)
    for name, function, text in (
        ("show", _show, "what a checkpoint holds (of a run: the newest)"),
        ("convert", _convert, "what it takes to load it on another mesh"),
    ):
        command(name, function, text).add_argument("path", type=_place, help=where)
    differ = command("diff", _diff, "the first tensors that differ; exit code 1 if any")
    differ.add_argument("first", type=_place, help=where)
    differ.add_argument("second", type=_place, help=where)
    export = command("export", _export, "the weights as one file")
    export.add_argument("path", type=_place, help=where)
    export.add_argument("target", type=Path, help="a name ending in .safetensors or .pt")
    export.add_argument("--all", action="store_true", help="the optimizer's state, too")
    bench = command("bench", _bench, "what a save costs, beside torch's ways")
    bench.add_argument("--megabytes", type=int, default=512, help="size of the state (512)")
    bench.add_argument("--repeats", type=int, default=5, help="saves of each way (5)")
    bench.add_argument("--directory", type=Path, default=Path(), help="where to write (here)")
    bench.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


def _place(text: str) -> Path:
    """What stands there; else the run of this name in runs/."""
    return named(text) or Path(text)


def _is_checkpoint(path: Path) -> bool:
    return (path / manifest.NAME).exists() or path.name.startswith(("step-", "damaged-step-"))


def _shelf(path: Path) -> Path:
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not directory.is_dir():
        raise ConfigError(f"{path}: there is no such run or checkpoint")
    if not shelf.published(directory) and not shelf.refused(directory):
        raise ConfigError(f"{directory} holds no checkpoint")
    return directory


def _checkpoint(path: Path) -> Path:
    if _is_checkpoint(path):
        return path
    found = shelf.published(_shelf(path))
    if not found:
        raise ConfigError(f"{path} holds no checkpoint that was not refused")
    return found[max(found)]


def _metrics(facts: dict[str, Any]) -> dict[str, Any]:
    metrics = facts.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return math.inf


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.4g} TB"


def _plain(text: str) -> str:
    """A stranger's text without what a terminal would obey."""
    return "".join(sign if sign.isprintable() else "�" for sign in text)
