"""`python launch/submit.py --nodes 2 digits`: start a run, on Slurm or on this machine.

The front door: it finds the checkout around it and hands over to launch.submission.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks; return the exit code."""
    from launch import submission

    return submission.main(argv)


class _CalledWhenUsed(ModuleType):
    """Stands for a module whose functions are imported, and hardly ever called."""

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*words, **named)

        return call


def _import_config() -> None:
    import train.packages as _packages  # noqa: F401

    # pydantic imports these modules, an eighth of a dry run, to find plugins, which train.config
    # switches off, and to compare secrets.
    for name in ("importlib.metadata", "secrets"):
        sys.modules[name] = _CalledWhenUsed(name)
    import train.config  # noqa: F401

    for name in ("importlib.metadata", "secrets"):
        del sys.modules[name]


if __name__ == "__main__":
    gc.disable()  # a tenth of a second, most of it imports: there is no garbage to look for
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    _import_config()
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)  # taking all modules apart would be a tenth of a dry run
