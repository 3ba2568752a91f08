"""`rollcall checkpoint list|show|verify|export`: only `export` imports torch; no code is run."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcall.cli.parser import parser as command_parser
from rollcall.config import ConfigError
from rollcall.messages.refusal import refuse
from rollcall.messages.text import clock, did_you_mean, size, table
from rollcall.records.run_dir import named
from rollcall.train.checkpoint import layout, manifest, scores
from rollcall.train.checkpoint.contents import Damaged, Manifest
from rollcall.train.checkpoint.tools import verify


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.command(arguments))
    except (ConfigError, Damaged) as error:
        problem = str(error)
    except OSError as error:
        name = error.filename or vars(arguments).get("target")
        hint = "" if error.filename else "; free some space there, or choose another target"
        problem = f"{name}: {error.strerror or error}{hint}" if name else str(error)
    return refuse(_plain(problem))


def _list(arguments: argparse.Namespace) -> int:
    for path in arguments.paths:
        directory = _directory(path)
        print(f"{directory}:")
        rows: list[tuple[str, ...]] = [("step", "saved", "size", "ranks", "torch", "")]
        rows += [_row(checkpoint) for _, checkpoint in sorted(layout.published(directory).items())]
        names = [checkpoint.name for checkpoint in layout.refused(directory)]
        rows += [(name, "", "", "", "", "damaged, set aside") for name in names]
        for line in table([[_plain(cell) for cell in row] for row in rows]):
            print(f"  {line}")
    return 0


def _row(path: Path) -> tuple[str, ...]:
    try:
        stored = manifest.read(path)
    except (Damaged, ConfigError) as error:
        damaged = "damaged: " if isinstance(error, Damaged) else ""
        return (path.name, "", "", "", "", f"{damaged}{error}")
    facts = stored.facts
    saved = clock(_number(facts.get("time")))
    ranks, version = str(facts.get("world_size")), str(facts.get("torch"))
    return (str(stored.step), saved, size(stored.nbytes), ranks, version, _metrics(stored))


def _metrics(stored: Manifest) -> str:
    pairs = stored.about("metrics").items()
    return ", ".join(f"val_{name} {_number(value):.4g}" for name, value in pairs)


def _show(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)
    stored = manifest.read_named(path)
    print(f"{path}: {len(stored.tensors)} tensors, {size(stored.nbytes)}")
    for name, fact in stored.facts.items():
        print(f"  {_plain(name)}: {_plain(json.dumps(fact))}")
    for name, count in stored.files.items():
        print(f"  {name}: {count} bytes")
    for tensor in stored.tensors.values():
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        print(f"  {_plain(tensor.name)}: {tensor.dtype} {shape}, {len(tensor.pieces)} pieces")
    for name, (_, value) in stored.values.items():
        print(f"  {_plain(name)} = {_plain(json.dumps(value))}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    code = 0
    for path in arguments.paths:
        is_one = _is_checkpoint(path)
        for checkpoint in [path] if is_one else sorted(layout.published(_directory(path)).values()):
            problems = verify.problems(checkpoint)
            if checkpoint != path and not checkpoint.exists():  # the training has just removed it
                continue
            print(f"{checkpoint}: {'damaged' if problems else 'intact'}")
            for problem in problems:
                print(f"  {_plain(problem)}")
                code = 1
    return code


def _export(arguments: argparse.Namespace) -> int:
    path, target = _checkpoint(arguments.path, arguments.best), arguments.target
    form = arguments.format or target.suffix.removeprefix(".")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: expected a new name in a folder that exists")
    from rollcall.train.checkpoint.tools import export  # imports torch

    if form not in export.FORMATS:
        forms = ".safetensors or .pt, or for a new folder --format hf"
        raise ConfigError(f"{target}: expected a name that ends in {forms}")
    if arguments.merge:
        from rollcall.train.checkpoint.tools import merged

        if form != "hf" or arguments.all or _is_checkpoint(arguments.path):
            raise ConfigError("--merge expects a run and --format hf, without --all")
        return merged.write(str(arguments.path), target, arguments.best)
    stored = manifest.read_named(path)
    with manifest.naming(path):
        count = export.export(path, target, form, arguments.all)
    average = "its average" if stored.has_average and not arguments.all else ""
    remarks = [*filter(None, (average, _metrics(stored) if arguments.best else ""))]
    suffix = f" ({', '.join(remarks)})" if remarks else ""
    print(f"{target}: {count} tensors of {path}{suffix}")
    return 0


def _parser() -> argparse.ArgumentParser:
    meaning = "Look into checkpoints. No code from a checkpoint is run."
    parser = command_parser("checkpoint", meaning)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    path_help = "a run directory, a run's name in runs/, or the directory of one checkpoint"

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function)
        return added

    list_ = command("list", _list, "list the checkpoints of runs")
    verify_text = "read every byte and name each damaged file; exit code 1 if any"
    for subparser in (list_, command("verify", _verify, verify_text)):
        subparser.add_argument("paths", type=_path, nargs="+", help=path_help)
    show = command("show", _show, "show what a checkpoint holds (of a run: the newest)")
    export = command("export", _export, "write the weights for other programs")
    for subparser in (show, export):
        subparser.add_argument("path", type=_path, help=path_help)
    target = "a name that ends in .safetensors or .pt, or a new folder"
    export.add_argument("target", type=Path, help=target)
    forms = "hf: a folder for transformers' from_pretrained; peft: for PeftModel.from_pretrained"
    export.add_argument("--format", choices=("safetensors", "pt", "hf", "peft"), help=forms)
    best = "the checkpoint with the best validation, not the newest"
    export.add_argument("--best", action="store_true", help=best)
    merge = "with --format hf: add the adapters of the run to the weights that they adapt"
    export.add_argument("--merge", action="store_true", help=merge)
    export.add_argument("--all", action="store_true", help="include the optimizer's state")
    return parser


def _path(text: str) -> Path:
    return named(text) or Path(text)


def _is_checkpoint(path: Path) -> bool:
    return (path / manifest.NAME).exists() or path.name.startswith(("step-", "damaged-step-"))


def _directory(path: Path) -> Path:
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not directory.is_dir():
        hint = did_you_mean(str(path), (run.name for run in Path("runs").glob("*")))
        hint = hint or "; `rollcall status` lists runs"
        raise ConfigError(f"{path}: no such run or checkpoint{hint}")
    if not layout.published(directory) and not layout.refused(directory):
        raise ConfigError(f"{directory} holds no checkpoint; `rollcall status` lists runs")
    return directory


def _checkpoint(path: Path, best: bool = False) -> Path:
    if _is_checkpoint(path):
        return path
    if best:
        return layout.path_of(_directory(path), scores.best(_directory(path)))
    if not (checkpoints := layout.published(_directory(path))):
        raise ConfigError(f"{path}: all checkpoints are damaged and were set aside")
    return checkpoints[max(checkpoints)]


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return math.inf


def _plain(text: str) -> str:
    """Replace the characters of a stranger's text that could control a terminal."""
    return "".join(sign if sign.isprintable() else "�" for sign in text)
