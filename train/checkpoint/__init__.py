"""How does training survive a crash? By checkpoints, saved beside it and checked when loaded.

`contents`, `manifest`, `layout` and `write` need no torch, so any machine can inspect a checkpoint.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcall.train.checkpoint.checkpointer import Checkpointer as Checkpointer
    from rollcall.train.checkpoint.engine import SharedEngine as SharedEngine

_MODULES = {"Checkpointer": "checkpointer", "SharedEngine": "engine"}
__all__ = ["Checkpointer", "SharedEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollcall.train.checkpoint' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
