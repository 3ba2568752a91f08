"""Code that a configuration names: `package.module:attribute`, or a short name of the catalog."""

import importlib
import importlib.util
import re
import traceback
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rollcall.config.schema import ConfigError
from rollcall.text import did_you_mean

KEYS = re.compile(
    r"model\.name|data\.name|data\.collate|train\.loss|optim\.name|optim\.schedule"
    r"|(train\.metrics|train\.callbacks|log\.to)\..+\.name"
)
"""The keys whose value may name code; a `:` in another value may mean something else."""


def load_attribute(name: str, key: str, known: Mapping[str, str], others: str = "") -> Any:
    """Import the code that a configuration key names.

    Args:
        name: a short name, or `package.module:attribute`.
        known: the code of each short name, as `package.module:attribute`.
        others: further values that the caller accepts, for the message.

    Raises:
        ConfigError: the name is unknown, or the module or attribute cannot be imported.
    """
    module, colon, attribute = known.get(name, name).partition(":")
    if not colon:
        names = ", ".join([*known, others] if others else known)
        choices = f"; choose {names}, or your own as package.module:attribute"
        raise ConfigError(f"{key}: unknown '{name}'{did_you_mean(name, known) or choices}")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(_import_problem(f"{key}={name}", module, error)) from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise ConfigError(f"{key}={name}: {error}") from error


def named(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every value that is a `package.module:attribute`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from named(value, f"{above}{key}.")
        elif isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            yield above + key, value


def check_modules(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a module that a configuration names is nowhere; import nothing."""
    for key, value in named(values):
        if not KEYS.fullmatch(key):
            continue
        top = value.partition(":")[0].partition(".")[0]
        if not (importlib.util.find_spec(top) or PathFinder.find_spec(top, [""])):
            raise ConfigError(missing(f"{key}={value}", top))


def missing(what: str, module: str) -> str:
    """Return the refusal of a value that names a module which is nowhere."""
    return (
        f"{what}: module '{module}' is neither in {Path.cwd()} nor installed; "
        f"start from the directory that holds {module}, or add that directory to PYTHONPATH"
    )


def _import_problem(what: str, module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return missing(what, str(error.name))
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        last = next(frame for frame in reversed(frames) if not frame.filename.startswith("<"))
        file, line, text = last.filename, last.lineno, str(error)
    return f"{what}: importing {module} fails at {file}:{line}: {type(error).__name__}: {text}"
