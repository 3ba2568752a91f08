"""Where this copy of rollcall lies, and how to run its commands. No torch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollcall.commands import TRAIN as TRAIN_COMMANDS

ROOT = Path(__file__).resolve().parents[1]
"""The directory that holds the package: a checkout, or site-packages."""
IS_CHECKOUT = (ROOT / "env" / "run").is_file()
SITE = Path(os.environ.get("ROLLCALL_SITE") or (ROOT / "site" if IS_CHECKOUT else "/etc/rollcall"))
"""An administrator's folder for all users: `clusters/`, and env/run's environments."""
PACKAGED = (
    ("env", "launch", "rollcall", "slurm", "train", "pyproject.toml")
    if IS_CHECKOUT
    else ("rollcall",)
)
"""The parts of rollcall under ROOT, for a ROOT that is not a git checkout."""
TRAIN = ("-m", "rollcall.train")
"""The program of a rank that trains."""
USER_PROGRAM = ("-m", "rollcall.launch.rank.user_program")
"""Starts a program in a copy of the user's directory: followed by the directory and the program."""


def command(*words: str) -> tuple[str, ...]:
    """Return the command line that runs a rollcall command with this Python."""
    return (sys.executable, "-m", "rollcall", *words)


def environment() -> dict[str, str]:
    """Return this environment with this copy on the module path: for a child in any directory."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def training_words(program: Sequence[str]) -> tuple[str, ...] | None:
    """Return the recipe and the `key=value` words of rollcall's training; None for another program.

    Args:
        program: the command line of a rank, without the interpreter.
    """
    names = [TRAIN, ("-m", "train")]
    if tuple(program[:2]) == USER_PROGRAM:
        program, names = program[3:], [TRAIN]  # there, `train` is the user's own module
    if tuple(program[:2]) not in names or (len(program) > 2 and program[2] in TRAIN_COMMANDS):
        return None
    return tuple(program[2:])


def is_training(program: Sequence[str]) -> bool:
    """Return whether a rank's program is rollcall's training."""
    return training_words(program) is not None
