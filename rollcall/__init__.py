"""Train PyTorch models on any number of ranks, from one process to many nodes.

You can also use its parts in your own training loop: `from rollcall import Checkpointer, World`.
Names are imported on first use, so that commands without torch start quickly.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcall.config import Config as Config
    from rollcall.run_dir import RunDir as RunDir
    from rollcall.train.checkpoint.checkpointer import Checkpointer as Checkpointer
    from rollcall.train.data.loader import Loader as Loader
    from rollcall.train.data.order import Order as Order
    from rollcall.train.dist.signals import StopSignals as StopSignals
    from rollcall.train.dist.world import World as World

_MODULES = {
    "Checkpointer": "rollcall.train.checkpoint.checkpointer",
    "Config": "rollcall.config",
    "Loader": "rollcall.train.data.loader",
    "Order": "rollcall.train.data.order",
    "RunDir": "rollcall.run_dir",
    "StopSignals": "rollcall.train.dist.signals",
    "World": "rollcall.train.dist.world",
}

__all__ = ["Checkpointer", "Config", "Loader", "Order", "RunDir", "StopSignals", "World"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollcall' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
