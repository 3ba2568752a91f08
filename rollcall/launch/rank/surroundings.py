"""The environment of a rank: what its framework needs, and no variables of the supervisor."""

import importlib.util
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from rollcall.launch.frameworks import TABLE
from rollcall.launch.frameworks.framework import KeyValueStore, RankContext
from rollcall.system import hosts
from rollcall.system.files import write_once
from rollcall.system.process import LARGE_PAGES

OF_SUPERVISOR = ("SUBMITIT_", "PMI_", "PMIX_", "PMI2_", "SLURM_PMI", "SLURM_GTIDS")
"""Beginnings of variables that describe the supervisor as a task of its step."""
OWN = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "SLURM_TIME_FORMAT": "standard", **LARGE_PAGES}
"""Variables that rollcall sets for itself."""
RANK_OPTIONS = "ROLLCALL_RANK_OPTIONS"
"""The variable with the options of a rank that torchrun starts, as JSON."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""The time that nodes and ranks wait for each other; the slowest disk must import torch in it."""


def prepare(
    env: MutableMapping[str, str],
    framework: str,
    folder: Path,
    ranks: Sequence[int] = (),
    roles: Sequence[str] = (),
) -> None:
    """Change a rank's environment, which has torchrun's variables, in place.

    Args:
        folder: where ranks without torch exchange what others need; all of them see it.
        ranks: how many ranks each node has; empty if all have the same number.
        roles: the role of each rank; empty if all do the same.
    """
    exchange = (lambda: store(env, folder)), (lambda: _addresses(env, folder))
    rank = RankContext(env, *exchange, ranks, roles)
    for name, value in list(env.items()):
        if name.startswith(OF_SUPERVISOR) or OWN.get(name) == value:
            del env[name]
    if "SLURM_STEP_ID" in env:
        env.update(_slurm(env, rank))
    variables = TABLE[framework].variables(rank)
    env.update({name: str(value) for name, value in variables.items()})


def _slurm(env: Mapping[str, str], rank: RankContext) -> dict[str, str]:
    """Return Slurm's variables as srun would set them if it had started each rank as a task."""
    counts = (f"{size}(x{nodes})" if nodes > 1 else str(size) for _, nodes, size in rank.blocks)
    per_node = ",".join(counts)
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), rank.world_size),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_NTASKS_PER_NODE": rank.local_world_size,
        "SLURM_PROCID": rank.rank,
        "SLURM_LOCALID": rank.local_rank,
        "SLURM_NODEID": rank.node,
        "SLURM_TASK_PID": os.getpid(),
    }
    if cpus := env.get("SLURM_CPUS_PER_TASK"):
        values["SLURM_CPUS_PER_TASK"] = max(1, int(cpus) // rank.local_world_size)
    return {name: str(value) for name, value in values.items()}


class Files:
    """A store in a folder, for ranks or nodes without torch."""

    def __init__(self, folder: Path, rank: str) -> None:
        """Use the folder, which all of them see, under a name that none of the others has."""
        self._folder, self._rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: str, /) -> None:
        """Write a value, once: the last two ranks at a barrier may both say that it is passed."""
        write_once(self._folder / quote(key, ""), value)

    def get(self, key: str, /) -> bytes:
        """Wait for a value; raise TimeoutError after JOIN_TIMEOUT."""
        end = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while not self.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(f"{self._folder}: another rank has not written '{key}'")
            time.sleep(0.05)
        return (self._folder / quote(key, "")).read_bytes()

    def add(self, key: str, _: int, /) -> int:
        """Count the ranks that have called this with a key."""
        self.set(f"{key}.{self._rank}", "")
        return sum(path.name.startswith(quote(f"{key}.", "")) for path in self._folder.iterdir())

    def check(self, keys: list[str], /) -> bool:
        """Return True if all these values exist."""
        return all((self._folder / quote(key, "")).exists() for key in keys)


def store(env: Mapping[str, str], folder: Path) -> KeyValueStore:
    """Connect to the store of the ranks' parents; a process group uses the same one."""
    if importlib.util.find_spec("torch") is None:
        return Files(folder, env["RANK"])
    from torch.distributed import PrefixStore, TCPStore

    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    server = TCPStore(*address, is_master=False, timeout=JOIN_TIMEOUT, wait_for_workers=False)
    return PrefixStore("rollcall/ranks", server)


def _addresses(env: Mapping[str, str], folder: Path) -> Sequence[str]:
    """Exchange an address and a free port of each rank."""
    head, shared = env["MASTER_ADDR"], store(env, folder)
    # On the head, the kernel's route to itself begins at that same address.
    address = head if head.startswith("127.") or head == "::1" else hosts.route(head).address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
        shared.set(env["RANK"], f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        # Bound until all have chosen, so that no two ranks of a host choose the same port.
        return [shared.get(str(rank)).decode() for rank in range(int(env["WORLD_SIZE"]))]
