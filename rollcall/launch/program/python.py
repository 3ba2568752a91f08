"""The Python of a job: where it is, what it has, and what a program imports with it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollcall.cli.installation import ROOT
from rollcall.launch.program import probe
from rollcall.messages.refusal import RefusedError

OLDEST = (3, 11)
ENV_RUN = "ROLLCALL_TORCH" in os.environ
"""Whether env/run made the environment that runs rollcall."""


class ProgramError(RefusedError):
    """A program needs something that is missing; the message says what to do."""


@dataclass(frozen=True)
class Facts:
    """The answer of a Python about itself and about a program; see probe.py."""

    executable: str
    python: str
    first: str  # the directory that Python searches first for the program's modules
    torch: str | None  # its version
    own: Mapping[str, str]  # modules that are not installed, and where they lie
    shadowing: Sequence[str]  # directories that hide other modules if they are searched first
    broken: str  # a syntax error in the program or in a module that it imports, and where
    missing: Mapping[str, str]  # modules that were not found, and where they are imported

    def describe(self) -> Iterator[str]:
        """Yield lines for people: this Python, and what it lacks."""
        has_torch = f"torch {self.torch}" if self.torch else "no torch"
        yield f"python: {self.executable}, version {self.python}, {has_torch}"
        yield from self.lacks()

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each module that is imported and missing."""
        for name, where in self.missing.items():
            if name == "rollcall":  # the ranks get the run's own copy
                continue
            file, colon, line = where.partition(".py:")
            shown = f"{os.path.relpath(file)}{colon}{line}" if colon else where
            is_ours = ENV_RUN and self.executable == sys.executable
            cure = f"add it with env/run --with {name}" if is_ours else "install it there"
            cure += ", or name another interpreter with --python"
            yield f"{shown} imports {name}, which {self.executable} does not have: {cure}"


@dataclass(frozen=True)
class Imports:
    """The user's modules outside the directory in which a program works."""

    inside: tuple[Path, ...]  # directories of the checkout that the ranks must search
    outside: Mapping[Path, tuple[str, ...]]  # modules elsewhere, by directory; the run gets copies
    needs_rollcall: bool  # whether the program imports rollcall itself, which is not installed


def find(text: str) -> str:
    """Return the interpreter of --python, a program or an environment, or raise ProgramError."""
    place = Path(text).expanduser()
    if place.is_dir():
        place = place / "bin" / "python"
    found = shutil.which(str(place), path=_path_of_user())
    if found is None:
        expected = "a program such as venv/bin/python, or the directory of an environment"
        raise ProgramError(f"--python {text}: no such interpreter; expected {expected}")
    return os.path.abspath(found)  # noqa: PTH100 - the link is what makes it an environment


def _path_of_user() -> str:
    """Return PATH without the directories of rollcall's own environment, which env/run adds."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    sites = [path for path in sys.path if path.endswith("/site-packages")]  # env/run --with has two
    own = [f"{ROOT}/env/bin", *(os.path.normpath(f"{path}/../../../bin") for path in sites)]
    return os.pathsep.join(name for name in folders if not (ENV_RUN and name in own))


def ask(executable: str, directory: Path, words: Sequence[str]) -> Facts:
    """Ask a Python about itself and a program: a script's absolute path, or `-m` and modules."""
    is_other = executable != sys.executable
    if not words and not is_other:  # no program to look at, and the Python is this one
        return Facts(**probe.report())
    command = [executable, probe.__file__, str(directory), *words]
    env = dict(os.environ)
    if is_other:
        activate(executable, env)  # as for the ranks
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    try:
        facts = Facts(**json.loads(done.stdout))
    except (ValueError, TypeError):
        last = done.stderr.strip().rpartition("\n")[2]
        raise ProgramError(f"{executable} cannot be used: {last or 'it prints nothing'}") from None
    if tuple(map(int, facts.python.split(".")[:2])) < OLDEST:
        needs = f"rollcall needs {OLDEST[0]}.{OLDEST[1]} or newer there"
        raise ProgramError(f"{executable} is Python {facts.python}, and {needs}")
    return facts


def imports(facts: Facts, checkout: Path) -> Imports:
    """Sort the user's modules by place; raise ProgramError if a directory has another name."""
    inside: dict[Path, None] = {}
    outside: dict[Path, tuple[str, ...]] = {}
    needs_rollcall = "rollcall" in facts.missing
    whole = checkout.resolve()
    for name, place in facts.own.items():
        root, file = Path(place).parent, Path(place).name
        if root == ROOT and whole != ROOT:
            needs_rollcall = True
        elif file.split(".")[0] != name:
            raise ProgramError(
                f"the module {name} is installed in editable mode from {place}, a directory of "
                "another name, so the run cannot have a copy of it; rename the directory"
            )
        elif root.is_relative_to(whole) and str(root) not in facts.shadowing:
            if str(root) != facts.first:
                inside[root.relative_to(whole)] = None
        elif str(root) != facts.first:
            outside[root] = (*outside.get(root, ()), file)
    return Imports(tuple(inside), outside, needs_rollcall)


def activate(executable: str, env: MutableMapping[str, str]) -> None:
    """Change environment variables as if the interpreter's environment had been activated."""
    folder = Path(executable).parent
    env["PATH"] = os.pathsep.join([str(folder), env.get("PATH", os.defpath)])
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONNOUSERSITE"):  # env/run's, or another one's
        env.pop(name, None)
    if (folder.parent / "pyvenv.cfg").exists():
        env["VIRTUAL_ENV"] = str(folder.parent)
