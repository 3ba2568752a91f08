"""Whose code a configuration may run, decided before anything is imported. No torch.

Words that you type may name any installed package. A file may come from somebody else: it may name
your own modules and harmless ones, and asks for the rest. Nothing may name Python's own library.
"""

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from rollcall.messages.refusal import ConfigError
from rollcall.system.files import stranger

PACKAGE = Path(__file__).resolve().parents[1]
NAME = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
LIBRARY = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
HARMLESS = ("torch.nn", "torch.nn.functional", "torch.optim", "torchvision.models")
"""Installed modules that any file may name: they hold layers, losses, optimizers and models."""
COMMANDS = re.compile(
    r"(torch\.(hub|serialization|package|jit|multiprocessing|utils(?!\.data\b)|onnx|_inductor"
    r"|_?(ops|classes)|distributed\.(run|launch\w*|elastic))"
    r"|rollcall\.(cli|config|launch|messages|records|system)|numpy\.(f2py|testing|distutils)"
    r"|__main__|psutil|submitit|pip|setuptools|pkg_resources|distutils|pytest|_pytest|IPython|joblib"
    r"|cloudpickle|dill)\b"
)
"""Modules whose functions run commands, download or load code, or unpickle files."""


def refuse_commands(setting: str, module: str) -> None:
    """Raise ConfigError if a module runs commands or unpickles, or is part of Python itself."""
    if COMMANDS.match(module) or _kind(module) == "Python":
        raise ConfigError(
            f"{setting}: {module} is not for models, data or training: no configuration may name "
            "Python's own modules, or modules that run commands or unpickle files"
        )


def check(names: Iterable[tuple[str, str]], file: Path, words: Sequence[str]) -> str:
    """Raise ConfigError unless all code may run that a file and the words typed with it name.

    Return the trusted packages and paths that the file needs, for the ranks.
    """
    typed = set(re.findall(NAME, " ".join(words)))
    asked = [word.partition("=")[2] for word in words if word.startswith("run.trust=")]
    needed: dict[str, str] = {}
    for key, name in names:
        module = name.partition(":")[0]
        refuse_commands(f"{key}={name}", module)
        if _kind(module) == "installed":
            top, is_harmless = module.partition(".")[0], module in HARMLESS
            if name not in typed and not is_harmless:
                is_known = name in _trusted() and not stranger(file)
                needed[name if is_known else top] = f"{key}={name}"
            elif not is_harmless and top != PACKAGE.name:
                _remember(name)  # from now on the run's own configuration names it
        elif name not in typed and stranger(file):
            needed[str(file.resolve())] = f"{key}={name}"
    whose = f" of {stranger(file)}" if stranger(file) else ""
    for entry, setting in needed.items():
        _require(entry, f"{file}{whose} sets {setting}", asked)
    return ",".join(needed)


def check_words(words: Sequence[str], file: Path) -> None:
    """Raise ConfigError unless all code may run that a file names as words of a command line."""
    if any(word.startswith("run.trust=") for word in words):
        raise ConfigError(f"{file}: run.trust counts only on the command line")
    check([("code", name) for name in re.findall(NAME, " ".join(words))], file, ())


def require_owner(path: Path, what: str) -> None:
    """Raise ConfigError if a file or run belongs to another user whom this one does not trust."""
    if user := stranger(path):
        _require(str(path.resolve()), f"{what} {path} belongs to {user}", ())


def _require(entry: str, reason: str, asked: Sequence[str]) -> None:
    """Return if the user trusts a package or path; ask on a terminal, else raise ConfigError."""
    known = [text.strip() for line in (*asked, *_trusted()) for text in line.split(",")]
    known += [os.path.realpath(text) for text in known if text.startswith("/")]  # such as /home
    if any(entry == text or entry.startswith(f"{text}/") for text in filter(None, known)):
        return
    if sys.stdin and sys.stdin.isatty() and sys.stderr.isatty() and not _is_rank():
        print(f"rollcall: {reason}. It may run any code as you.", file=sys.stderr)
        print(f"Do you trust {entry} from now on? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            _remember(entry)
            return
    raise ConfigError(
        f"{reason}, which may run any code as you; if you trust {entry}, add it to {users_file()} "
        "as a line, or to run.trust on the command line of a run"
    )


def _is_rank() -> bool:
    return bool({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & os.environ.keys())


def users_file() -> Path:
    """Return the file with the packages and paths that the user trusts, one on each line."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return Path(folder, "rollcall", "trusted")


def origin(module: str) -> str | None:
    """Return the file of a module without importing it: empty for a folder, None if absent."""
    folders, spec = ["", *sys.path], None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = [*(spec.submodule_search_locations or [])]
    return (spec and spec.origin) or ""


def _kind(module: str) -> str:
    """Return "Python" for the standard library, "installed" for a package, empty for the rest."""
    file = getattr(sys.modules.get(module), "__file__", None) or origin(module)
    if file is None:  # a module without a file is as trusted as its package
        package = module.rpartition(".")[0]
        if package:
            return _kind(package)
        return "Python" if module in sys.stdlib_module_names else ""
    path, python = Path(os.path.realpath(file)), map(os.path.realpath, LIBRARY)
    if {"site-packages", "dist-packages"} & {*Path(file).parts} or PACKAGE in path.parents:
        return "installed"
    return "Python" if any(path.is_relative_to(folder) for folder in python) else ""


def _trusted() -> list[str]:
    sites = (os.environ.get("ROLLCALL_SITE"), PACKAGE.parent / "site", "/etc/rollcall")
    lines = []
    for path in (users_file(), *(Path(site) / "trusted" for site in sites if site)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines += [] if stranger(path) else path.read_text().splitlines()
    return lines


def _remember(entry: str) -> None:
    with contextlib.suppress(OSError):
        if not _is_rank() and entry not in _trusted():
            users_file().parent.mkdir(parents=True, exist_ok=True)
            with users_file().open("a") as file:
                file.write(f"{entry}\n")
