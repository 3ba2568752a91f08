"""Tokenizers of transformers, read from a folder."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rollcall.config import plugin
from rollcall.config.schema import ConfigError


@cache
def load(folder: str, key: str) -> Any:
    """Return the tokenizer in a folder; ConfigError, which names the key, if there is none."""
    library = package("transformers", key)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    path = os.path.expanduser(folder)  # noqa: PTH111 (a Path would drop `./`)
    with refused(f"{key}={folder}: no tokenizer"):
        options = {"local_files_only": True, "trust_remote_code": False}
        return library.AutoTokenizer.from_pretrained(path, **options)


def package(name: str, key: str) -> Any:
    """Import a package that a key needs; ConfigError if that fails, or if it is too old."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{plugin.needs(key, name)} ({error})") from error
    # In older ones, packed rows attend to each other, and no cache fits all models.
    if name == "transformers" and [*map(int, library.__version__.split(".")[:2])] < [4, 56]:
        problem = f"needs transformers 4.56 or newer, found {library.__version__}"
        raise ConfigError(f"{key} {problem}; pip install -U transformers")
    return library


@contextmanager
def refused(subject: str) -> Iterator[None]:
    """Raise ConfigError for an error of these libraries, with the first line of its message."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{subject}: {str(error).strip().splitlines()[0]}") from error
