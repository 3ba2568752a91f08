"""Check before the first step that all ranks have the same code, configuration and model."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollcall.config import Config
from rollcall.messages.text import dotted
from rollcall.train.ranks.device import chip_name
from rollcall.train.ranks.world import World

MUST_BE_EQUAL = ("torch", "configuration", "code", "model")
"""Facts that must be the same on all ranks."""
KERNELS = ("device", "cpu capability")
"""Facts that determine the order in which a kernel adds."""
MAX_SHOWN = 3
"""Number of differences that a message names."""
_hashes: dict[str, str] = {}
"""Hashes of the modules seen so far, without installed ones; most date from before the fork."""
_seen = 0
"""Number of modules seen so far."""


def check(world: World, config: Config, model: nn.Module) -> None:
    """Compare every rank with rank 0, before the model is spread over them; all call it together.

    Raise ConfigError if the torch version, the configuration, the code or the model differs.
    """
    local = {
        "host": world.host,
        "torch": torch.__version__,
        "device": chip_name(world.device),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "code": code(),
        # In the form in which rank 0's arrives: all keys are texts.
        "configuration": dotted(config.model_dump(mode="json", exclude={"run"})),
        "model": {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)  # a module may save other objects
        },
    }
    main = world.broadcast(local)
    texts = [text for name in MUST_BE_EQUAL for text in differences(name, main[name], local[name])]
    shown = "; ".join(texts[:MAX_SHOWN])
    world.raise_together(
        shown
        and f"rank {world.rank} on {world.host} differs from rank 0 on {main['host']}: {shown}. "
        "All nodes need the same files and the same environment"
    )
    kernels = [text for name in KERNELS for text in differences(name, main[name], local[name])]
    if kernels and config.exact:
        print(
            f"rollcall: warning: rank {world.rank} on {world.host} uses other kernels than rank 0 "
            f"({'; '.join(kernels)}); only runs on the same processors end with equal weights",
            file=sys.stderr,
            flush=True,
        )


def differences(name: str, main: Any, local: Any) -> Iterator[str]:
    """Yield a description of each difference between rank 0's fact and this rank's."""
    if isinstance(main, Mapping):
        # A launcher may import more source files on one of the ranks.
        for key in [key for key in main if key in local] if name == "code" else {**main, **local}:
            yield from differences(f"{name} {key}", main.get(key), local.get(key))
    elif main != local:
        is_code = name.startswith("code ")
        yield f"different {name}" if is_code else f"{name} is {local}, not {main}"


def code() -> dict[str, str]:
    """Hash the source of each imported module outside site-packages and the standard library."""
    global _seen
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # Reading a name writes to its reference count, which copies the page that forked ranks share.
    new = list(islice(reversed(sys.modules), max(0, len(sys.modules) - _seen)))
    _seen = len(sys.modules)
    for name in new:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name.startswith("__") or file.startswith(tuple(installed)):
            continue
        if file.endswith(".py") and Path(file).is_absolute():  # torch invents some file names
            _hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return dict(sorted(_hashes.items()))
