"""What does this rank run on, and with which code? Ranks that differ in it do not train together.

The same facts explain a difference between runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.config import Config
from train.proof.difference import dotted
from train.world import World

# What libraries read to choose other kernels, or another order of additions.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)


MUST_BE_EQUAL = ("torch", "configuration", "code", "model")
KERNELS = ("device", "cpu capability")
"""What decides in which order a kernel adds."""
SHOWN = 3


def check(world: World, config: Config, model: nn.Module) -> None:
    """Compare every rank with rank 0, before any of them trains; all call it together.

    Args:
        model: the whole model, not yet spread over the ranks.

    Raises:
        ConfigError: a rank has another torch, configuration, code or model; names it and its host.
    """
    mine = {
        **facts(world.device),
        "configuration": dotted(config.model_dump(exclude={"run"})),
        "model": {name: _layout(tensor) for name, tensor in model.state_dict().items()},
    }
    main = json.loads(world.broadcast_text(json.dumps(mine)))
    found = [text for name in MUST_BE_EQUAL for text in differences(name, main[name], mine[name])]
    world.raise_together(
        f"rank {world.rank} on {world.host} differs from rank 0 on {main['host']}: "
        f"{'; '.join(found[:SHOWN])}. All nodes need the same files and the same environment"
        if found
        else ""
    )
    others = [text for name in KERNELS for text in differences(name, main[name], mine[name])]
    if others and config.exact:
        print(
            f"rollcall: warning: rank {world.rank} on {world.host} has other kernels than rank 0 "
            f"({'; '.join(others)}): with exact=true the weights are those of this mixture",
            file=sys.stderr,
            flush=True,
        )


def differences(name: str, main: Any, mine: Any) -> Iterator[str]:
    """How a fact differs from rank 0's, in words; nothing if it does not.

    Of groups of facts those count that both have: a launcher may have imported more.
    """
    if isinstance(main, Mapping):
        shared = [key for key in main if key in mine] if name == "code" else {**main, **mine}
        for key in shared:
            yield from differences(f"{name} {key}", main.get(key), mine.get(key))
    elif main != mine:
        is_code = name.startswith("code ")
        yield f"other {name}" if is_code else f"{name} is {mine} and not {main}"


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def facts(device: torch.device) -> dict[str, Any]:
    """What can change the result of a run: versions, hardware, threads, settings and code.

    Args:
        device: where this rank computes.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "code": code(),
    }


def code() -> dict[str, str]:
    """A digest of the source of every module that is neither installed nor Python's own."""
    paths = sysconfig.get_paths()
    foreign = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        ours = not name.startswith("__") and not any(file.startswith(place) for place in foreign)
        if ours and file.endswith(".py") and Path(file).is_absolute():  # torch makes up some names
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
