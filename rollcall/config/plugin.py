"""Code that a configuration names as `package.module:attribute`."""

import importlib
import inspect
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollcall.config import trust
from rollcall.config.schema import ConfigError
from rollcall.messages.text import did_you_mean, listed


def load_attribute(name: str, key: str) -> Any:
    """Import `package.module:attribute`, the value of a key, if any; refuse what runs commands."""
    module, _, attribute = name.partition(":")
    setting = f"{key}={name}" if key else name
    trust.refuse_commands(setting, module)
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_problem(setting, module, error)) from error
    try:
        loaded = getattr(imported, attribute)
    except AttributeError as error:
        raise without(setting, dir(imported)) from error
    if inspect.isclass(loaded) or inspect.isroutine(loaded):  # from wherever it was imported
        trust.refuse_commands(setting, loaded.__module__ or module)
    return loaded


def without(setting: str, names: Iterable[str]) -> ConfigError:
    """Return the refusal of a value whose module has other names, but not this one."""
    module, _, attribute = setting.rpartition("=")[2].partition(":")
    public = [name for name in names if not name.startswith("_")]
    hint = did_you_mean(attribute, public) or f"; it has {listed(public) or 'none'}"
    return ConfigError(f"{setting}: module '{module}' has no attribute '{attribute}'{hint}")


def unknown(key: str, name: str, choices: Sequence[str], known: Iterable[str]) -> ConfigError:
    """Return the refusal of a short name, with the nearest known name or all choices."""
    others = f"; choose {', '.join(choices)}, or your own as " if choices else "; name it as "
    hint = did_you_mean(name, known) or f"{others}package.module:attribute"
    return ConfigError(f"{key}: unknown '{name}'{hint}")


def missing(setting: str, module: str) -> str:
    """Return the refusal of a value that names a module which does not exist."""
    return (
        f"{setting}: module '{module}' is neither in {Path.cwd()} nor installed; "
        f"start from the directory that holds {module}, add that directory to PYTHONPATH, or "
        f"install the package, for example with env/run --with {module}"
    )


def needs(setting: str, package: str) -> str:
    """Return the refusal of a value whose package is not installed."""
    return (
        f"{setting} needs the package {package}: pip install {package}, or start with "
        f"env/run --with {package}"
    )


def _import_problem(setting: str, module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return missing(setting, str(error.name))
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        last = next(frame for frame in reversed(frames) if not frame.filename.startswith("<"))
        file, line, text = last.filename, last.lineno, str(error)
    return f"{setting}: importing {module} fails at {file}:{line}: {type(error).__name__}: {text}"
