"""The location of this copy of rollcall, and how to run its commands. No torch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollcall.cli.commands import TRAIN as TRAIN_COMMANDS

ROOT = Path(__file__).resolve().parents[2]
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

CALL = ("-m", "rollcall.launch.api.call")
"""Calls a function of the user: followed by the file that has it, and the modules it needs."""


def version() -> str:
    """Return the version of this copy: of the checkout, or of the installed package."""
    if IS_CHECKOUT:
        lines = (ROOT / "pyproject.toml").read_text().splitlines()
        return next(line.split('"')[1] for line in lines if line.startswith("version = "))
    from importlib import metadata  # here: it takes a while, and only --version asks

    return metadata.version("rollcall")


def command(*words: str) -> tuple[str, ...]:
    """Return the command line that runs a rollcall command with this Python."""
    return (sys.executable, "-m", "rollcall", *words)


def environment() -> dict[str, str]:
    """Return this environment with this copy on the module path: for a child in any directory."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def training_words(program: Sequence[str]) -> tuple[str, ...] | None:
    """Return the recipe and the keys of a rank's command line; None for another program."""
    names = [TRAIN, ("-m", "train")]
    if tuple(program[:2]) == USER_PROGRAM:
        program, names = program[3:], [TRAIN]  # there, `train` is the user's own module
    if tuple(program[:2]) not in names or (len(program) > 2 and program[2] in TRAIN_COMMANDS):
        return None
    return tuple(program[2:])


def is_training(program: Sequence[str]) -> bool:
    """Return True if a rank's program is rollcall's training."""
    return training_words(program) is not None
