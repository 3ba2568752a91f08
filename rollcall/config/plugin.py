"""Code that a configuration names as `package.module:attribute`."""

import importlib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcall.config.schema import ConfigError
from rollcall.text import did_you_mean


def load_attribute(name: str, key: str) -> Any:
    """Import the code that a configuration key names; the key is empty for code that none names.

    Raises:
        ConfigError: the module or the attribute cannot be imported.
    """
    module, _, attribute = name.partition(":")
    what = f"{key}={name}" if key else name
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_problem(what, module, error)) from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise ConfigError(f"{what}: {error}") from error


def unknown(key: str, name: str, choices: Sequence[str], known: Iterable[str]) -> ConfigError:
    """Return the refusal of a short name: with the nearest of the known ones, or all choices."""
    others = f"; choose {', '.join(choices)}, or your own as " if choices else "; name it as "
    hint = did_you_mean(name, known) or f"{others}package.module:attribute"
    return ConfigError(f"{key}: unknown '{name}'{hint}")


def named(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every value that is a `package.module:attribute`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from named(value, f"{above}{key}.")
        elif isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            yield above + key, value


def missing(what: str, module: str) -> str:
    """Return the refusal of a value that names a module which is nowhere."""
    return (
        f"{what}: module '{module}' is neither in {Path.cwd()} nor installed; "
        f"start from the directory that holds {module}, or add that directory to PYTHONPATH"
    )


def _import_problem(what: str, module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return missing(what, str(error.name))
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        last = next(frame for frame in reversed(frames) if not frame.filename.startswith("<"))
        file, line, text = last.filename, last.lineno, str(error)
    return f"{what}: importing {module} fails at {file}:{line}: {type(error).__name__}: {text}"
