"""Find the user's code: the program that the ranks run, or the modules that a recipe names."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from rollcall.cli.installation import USER_PROGRAM
from rollcall.config import Config
from rollcall.config.arguments import named_code
from rollcall.launch.program.python import ProgramError

STARTERS = (
    *("python", "python3", "torchrun", "srun", "accelerate", "deepspeed", "mpirun", "mpiexec"),
    *("bash", "sh", "env", "conda", "nohup"),
)
"""Programs that people write before a script; rollcall starts the ranks itself."""

SHELL_SCRIPTS = (".sbatch", ".slurm", ".sh")


@dataclass(frozen=True)
class UserCode:
    """A directory of the user, of which the ranks get a copy, and the program in it."""

    checkout: Path  # the directory that is copied
    directory: Path  # inside it: where the ranks work
    words: tuple[str, ...] = ()  # the program, found from `directory`, and its arguments
    without: tuple[Path, ...] = ()  # directories in it that are not copied

    @property
    def name(self) -> str:
        """The default name of the program's runs."""
        first = self.words[0]
        return self.words[1].rpartition(".")[2] if first == "-m" else Path(first).stem

    @property
    def script(self) -> Path | None:
        """The program's file; None for a module, and for the modules of a recipe."""
        return self.directory / self.words[0] if self.words and self.words[0] != "-m" else None

    def in_copy(self, code: Path) -> Path:
        """Return the directory in which the ranks work, once `checkout` is copied to `code`."""
        return code / self.directory.relative_to(self.checkout)

    def command(self, code: Path, program: Sequence[str]) -> tuple[str, ...]:
        """Return what a rank runs so that a program starts in the copy."""
        return (*USER_PROGRAM, str(self.in_copy(code)), *program)


def checkout_of(directory: Path) -> Path:
    """Return the git checkout around a directory, or the directory itself outside git."""
    around = (place for place in (directory, *directory.parents) if (place / ".git").exists())
    return next(around, directory)


def find(words: Sequence[str]) -> UserCode:
    """Find the program that a command line names; raise ProgramError if no copy could have it."""
    directory = Path.cwd()
    checkout = checkout_of(directory)
    if words[0] == "-m":
        if len(words) == 1:
            raise ProgramError("-m: expected the name of a module after it")
        if words[1].endswith(".py") and Path(words[1]).is_file():
            raise ProgramError(f"-m {words[1]}: it is a file, not a module; remove -m")
        return UserCode(checkout, directory, tuple(words))
    script = Path(words[0])
    starter = Path(words[0].partition(" ")[0]).name  # the whole command may be quoted
    if starter in STARTERS and not script.is_file():
        advice = "write only the script or -m module and its arguments after `--`"
        raise ProgramError(f"{starter}: rollcall starts the ranks itself; {advice}")
    if not script.is_file():
        what = "a directory" if script.is_dir() else "no such file"
        what = "write variables before `rollcall`" if re.match(r"\w+=", words[0]) else what
        what = "remove the quotes" if Path(words[0].partition(" ")[0]).is_file() else what
        raise ProgramError(f"{script}: {what}; expected a script or -m module after `--`")
    if script.suffix in SHELL_SCRIPTS:
        raise ProgramError(f"{script} is a shell script, not a program of Python: sbatch {script}")
    path = script.resolve()
    if not path.is_relative_to(checkout.resolve()):
        advice = f"submit it from its own directory: cd {path.parent}"
        raise ProgramError(f"{script} is outside {checkout}, which is copied for the run; {advice}")
    inside = os.path.relpath(script) if script.is_absolute() else words[0]
    return UserCode(checkout, directory, (inside, *words[1:]))


def modules_beside(config: Config) -> UserCode | None:
    """Find the modules here that a configuration names, without its data; None if none."""
    directory = Path.cwd()
    tops = [name.partition(":")[0].partition(".")[0] for _, name in named_code(config)]
    if not any(PathFinder.find_spec(top, [str(directory)]) for top in tops):
        return None
    return UserCode(checkout_of(directory), directory, without=(Path(config.data.root).absolute(),))
