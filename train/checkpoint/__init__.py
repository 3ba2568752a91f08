"""What survives? Checkpoints that are saved beside the training and checked when they are read.

`manifest`, `shelf` and `write` need no torch, so that a checkpoint can be inspected anywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.checkpoint.checkpointer import Checkpointer as Checkpointer
    from train.checkpoint.flight import Outcome as Outcome

_PLACES = {"Checkpointer": "checkpointer", "Outcome": "flight"}

__all__ = ["Checkpointer", "Outcome"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'train.checkpoint' has no attribute '{name}'")
    return getattr(importlib.import_module(f"train.checkpoint.{_PLACES[name]}"), name)
