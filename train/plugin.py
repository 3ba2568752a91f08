"""The user's own code by name: `package.module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from train.config import ConfigError


def load_attribute(name: str, key: str, known: Iterable[str]) -> Any:
    """Import what `package.module:attribute` names.

    Args:
        name: what the user wrote.
        key: the configuration key that it stands under, for the message.
        known: the names that need no import, for the message.

    Raises:
        ConfigError: the name has no colon, or there is no such module or attribute.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"{key}: there is no '{name}'; choose {', '.join(known)}, or name your own as "
            "package.module:attribute"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={name}: there is no module '{error.name}' here; is its directory on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{key}={name}: {error}") from error
