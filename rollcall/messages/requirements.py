"""Refuse a Python without rollcall's packages. Every entry point imports this module first."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import NoReturn

from rollcall.messages.refusal import refuse

PACKAGES = ("numpy", "PIL", "psutil", "rich", "sklearn", "submitit", "torch", "torchvision", "yaml")
"""Packages that rollcall imports only when it needs them; it always needs pydantic."""


@contextlib.contextmanager
def explain_missing_packages() -> Iterator[None]:
    """Exit with one sentence if one of rollcall's packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        _refuse(error.name)


def _refuse(package: str) -> NoReturn:
    text = (
        f"{sys.executable} does not have the package '{package}', which rollcall needs. Put "
        "./env/run before the command to use its environment or, without a checkout, install it"
    )
    sys.exit(refuse(text, everywhere=False))  # another node may have it


# A supervisor may run in a Python of the user's that has nothing but torch.
if sys.argv[1:2] != ["supervise"] and importlib.util.find_spec("pydantic") is None:
    _refuse("pydantic")
