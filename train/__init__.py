"""Train PyTorch models on any number of ranks, from one process to many nodes.

The parts are usable alone, in a loop of your own::

    from train import Checkpointer, World

They are imported on first use, so that `train.config` and `train.run` stay free of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.checkpoint import Checkpointer as Checkpointer
    from train.config import Config as Config
    from train.run import RunDir as RunDir
    from train.stop import StopSignals as StopSignals
    from train.world import World as World

_PLACES = {
    "Checkpointer": "train.checkpoint",
    "Config": "train.config",
    "RunDir": "train.run",
    "StopSignals": "train.stop",
    "World": "train.world",
}

__all__ = ["Checkpointer", "Config", "RunDir", "StopSignals", "World"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'train' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
