"""Which program do the ranks run, and where is its code? Our training, or the user's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from launch.options import OptionError


class ProgramError(OptionError):
    """The program cannot be run; the message says what is expected."""


@dataclass(frozen=True)
class Guest:
    """A program of the user's own: a script or a module that torchrun could start.

    Attributes:
        name: what runs are named after.
        checkout: the directory that is copied as the run's code.
        directory: where in it the program runs.
        words: the program as it is found from there, and its arguments.
    """

    name: str
    checkout: Path
    directory: Path
    words: tuple[str, ...]

    def command(self, code: Path) -> tuple[str, ...]:
        """What every rank runs once the checkout has been copied to `code`."""
        place = code / self.directory.relative_to(self.checkout)
        return ("-m", "launch.guest", str(place), *self.words)


def checkout_of(directory: Path) -> Path:
    """The git checkout around a directory; the directory itself where there is none."""
    around = (place for place in (directory, *directory.parents) if (place / ".git").exists())
    return next(around, directory)


def guest(words: Sequence[str]) -> Guest:
    """Find the program that a command line names, from the current directory.

    Raises:
        ProgramError: there is none, or it lies outside of what would be copied.
    """
    directory = Path.cwd()
    checkout = checkout_of(directory)
    if words[0] == "-m":
        if len(words) == 1:
            raise ProgramError("-m: the name of a module is expected behind it")
        name = words[1]
        top = name.partition(".")[0]
        if (
            PathFinder.find_spec(top, [str(directory)]) is None
            and PathFinder.find_spec(top) is None
        ):
            raise ProgramError(f"-m {name}: there is no module {top} in {directory} or installed")
        return Guest(name.rpartition(".")[2], checkout, directory, tuple(words))
    script = Path(words[0])
    if not script.is_file():
        raise ProgramError(f"{script}: there is no such file; a script or -m module is expected")
    place = script.resolve()
    if not place.is_relative_to(checkout.resolve()):
        raise ProgramError(
            f"{script} lies outside of {checkout}, which is copied for the run: submit it from its "
            f"own directory, cd {place.parent}"
        )
    inside = os.path.relpath(script) if script.is_absolute() else words[0]
    return Guest(script.stem, checkout, directory, (inside, *words[1:]))
