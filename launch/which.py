"""Which run does a supervisor work for? The given one, or the one that its words ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from launch.node import Node
from train.run import RunDir


def array_task(directory: Path, cells: Path | None, index: int) -> tuple[Path, list[str]]:
    """The run of one task of an array, and what its program is told besides.

    Args:
        directory: of the array, in which every task has a run of its own.
        cells: what the tasks run, if the array is a sweep.
        index: of the task.
    """
    if cells is None:
        return directory / f"task-{index}", []
    cell = json.loads(cells.read_text())[index]
    return directory / cell["name"], cell["words"]


def run_directory(given: Path | None, program: Sequence[str], node: Node) -> RunDir:
    """The run in this directory, or the one that the words ask for.

    Raises:
        ConfigError: the words are not what train takes.
    """
    if given is not None:
        return RunDir(given.absolute().parent, given.name)
    if list(program[:2]) == ["-m", "train"]:
        from train.config import parse  # here, because it costs 100 ms

        recipe, config = parse(program[2:])
        return RunDir(config.run.root, config.run.name or f"{recipe}-{node.job}")
    name = program[1] if program[0] == "-m" else Path(program[0]).stem
    return RunDir("runs", f"{name}-{node.job}")
