"""Find the user's code: the program that the ranks run, or the modules that a recipe names."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rollcall.config import plugin
from rollcall.installation import USER_PROGRAM
from rollcall.launch.program.python import ProgramError

STARTERS = ("python", "python3", "torchrun", "srun", "accelerate")
"""Programs that people write before a script; rollcall starts the ranks itself."""


@dataclass(frozen=True)
class UserCode:
    """A directory of the user, of which the ranks get a copy."""

    checkout: Path  # the directory that is copied
    directory: Path  # inside it: where the ranks work
    script: Path | None = None  # the program, unless it is a module
    without: tuple[Path, ...] = ()  # directories in it that are not copied

    def in_copy(self, code: Path) -> Path:
        """Return the directory in which the ranks work, once `checkout` is copied to `code`."""
        return code / self.directory.relative_to(self.checkout)

    def command(self, code: Path, program: Sequence[str]) -> tuple[str, ...]:
        """Return what a rank runs so that a program starts in the copy."""
        return (*USER_PROGRAM, str(self.in_copy(code)), *program)


@dataclass(frozen=True)
class Program:
    """A script or module of the user that torchrun could start."""

    name: str  # default name of its runs
    words: tuple[str, ...]  # the program, as found from the current directory, and its arguments
    code: UserCode


def checkout_of(directory: Path) -> Path:
    """Return the git checkout around a directory, or the directory itself outside git."""
    around = (place for place in (directory, *directory.parents) if (place / ".git").exists())
    return next(around, directory)


def find(words: Sequence[str]) -> Program:
    """Find the program that a command line names; raise ProgramError if no copy could have it."""
    directory = Path.cwd()
    checkout = checkout_of(directory)
    if words[0] == "-m":
        if len(words) == 1:
            raise ProgramError("-m: expected the name of a module after it")
        module = words[1]
        return Program(module.rpartition(".")[2], tuple(words), UserCode(checkout, directory))
    script = Path(words[0])
    if script.name in STARTERS and not script.is_file():
        advice = "write only the script or -m module and its arguments after `--`"
        raise ProgramError(f"{script.name}: rollcall starts the ranks itself; {advice}")
    if not script.is_file():
        raise ProgramError(f"{script}: no such file; expected a script or -m module after `--`")
    path = script.resolve()
    if not path.is_relative_to(checkout.resolve()):
        advice = f"submit it from its own directory: cd {path.parent}"
        raise ProgramError(f"{script} is outside {checkout}, which is copied for the run; {advice}")
    inside = os.path.relpath(script) if script.is_absolute() else words[0]
    code = UserCode(checkout, directory, directory / inside)
    return Program(script.stem, (inside, *words[1:]), code)


def modules_beside(values: Mapping[str, Any], data: Path) -> UserCode | None:
    """Find the modules in the current directory that a configuration names; None without any.

    Args:
        values: the configuration; any text in it may be a `package.module:attribute`.
        data: directory of downloaded data, which is not code.
    """
    directory = Path.cwd()
    modules = [text.partition(":")[0] for _, text in plugin.named(values)]
    tops = [name.partition(".")[0] for name in modules]
    if not any(PathFinder.find_spec(top, [str(directory)]) for top in tops):
        return None
    return UserCode(checkout_of(directory), directory, without=(data,))
