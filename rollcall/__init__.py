"""Train PyTorch models on any number of ranks, from one process to many nodes.

`rollcall.submit` starts a run from Python. You can also use parts of rollcall in your own training
loop: `from rollcall import Checkpointer, World`.
Names are imported on first use, so that commands without torch start quickly.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcall.config import Config as Config
    from rollcall.launch.api.call import checkpoint_dir as checkpoint_dir
    from rollcall.launch.api.job import Job, RunError, run, runs, submit
    from rollcall.launch.api.job import map as map
    from rollcall.messages.refusal import RefusedError as RefusedError
    from rollcall.records.run_dir import RunDir as RunDir
    from rollcall.train.checkpoint.checkpointer import Checkpointer as Checkpointer
    from rollcall.train.data.loader import Loader as Loader
    from rollcall.train.data.order import Order as Order
    from rollcall.train.parallel.experts import Experts as Experts
    from rollcall.train.ranks.measures import measure as measure
    from rollcall.train.ranks.signals import StopSignals as StopSignals
    from rollcall.train.ranks.world import World as World

_MODULES = {
    "Checkpointer": "rollcall.train.checkpoint.checkpointer",
    "Config": "rollcall.config",
    "Experts": "rollcall.train.parallel.experts",
    "Loader": "rollcall.train.data.loader",
    "Order": "rollcall.train.data.order",
    "RefusedError": "rollcall.messages.refusal",
    "RunDir": "rollcall.records.run_dir",
    "StopSignals": "rollcall.train.ranks.signals",
    "World": "rollcall.train.ranks.world",
    "checkpoint_dir": "rollcall.launch.api.call",
    "measure": "rollcall.train.ranks.measures",
}
_MODULES |= dict.fromkeys(
    ("Job", "RunError", "map", "run", "runs", "submit"), "rollcall.launch.api.job"
)

__all__ = ["Checkpointer", "Config", "Experts", "Job", "Loader", "Order", "RefusedError", "RunDir"]
__all__ += ["RunError", "StopSignals", "World", "checkpoint_dir", "measure"]
# Not `map`: `import *` must not replace Python's own.
__all__ += ["run", "runs", "submit"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        from rollcall.messages.text import did_you_mean  # here: only mistakes need it

        hint = did_you_mean(name, _MODULES) or f"; it has {', '.join(sorted(_MODULES))}"
        raise AttributeError(f"module 'rollcall' has no attribute '{name}'{hint}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
