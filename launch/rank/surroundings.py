"""The environment of a rank: what its framework needs, and no variables of the supervisor."""

import importlib.util
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from rollcall import hosts
from rollcall.launch.frameworks import TABLE
from rollcall.launch.frameworks.framework import Place, Store
from rollcall.process import LARGE_PAGES
from rollcall.records.files import write_once

OF_SUPERVISOR = ("SUBMITIT_", "PMI_", "PMIX_", "PMI2_", "SLURM_PMI", "SLURM_GTIDS")
"""Beginnings of variables that describe the supervisor as a task of its step."""
OWN = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "SLURM_TIME_FORMAT": "standard", **LARGE_PAGES}
"""Variables that rollcall sets for itself."""
EXCHANGE = timedelta(minutes=10)
"""How long a rank waits for the addresses of all others."""


def prepare(
    env: MutableMapping[str, str], framework: str, folder: Path, ranks: Sequence[int] = ()
) -> None:
    """Change a rank's environment, which has torchrun's variables, in place.

    Args:
        folder: where ranks without torch exchange what others need; all of them see it.
        ranks: how many ranks each node has; empty if all have the same number.
    """
    place = Place.of(env, lambda: _store(env, folder), lambda: _addresses(env, folder), ranks)
    for name, value in list(env.items()):
        if name.startswith(OF_SUPERVISOR) or OWN.get(name) == value:
            del env[name]
    if "SLURM_STEP_ID" in env:
        env.update(_slurm(env, place))
    variables = TABLE[framework].variables(place)
    env.update({name: str(value) for name, value in variables.items()})


def _slurm(env: Mapping[str, str], place: Place) -> dict[str, str]:
    """Return Slurm's variables as srun would set them if it had started each rank as a task."""
    counts = (f"{each}(x{nodes})" if nodes > 1 else str(each) for _, nodes, each in place.blocks)
    per_node = ",".join(counts)
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), place.world_size),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_NTASKS_PER_NODE": place.local_world_size,
        "SLURM_PROCID": place.rank,
        "SLURM_LOCALID": place.local_rank,
        "SLURM_NODEID": place.node,
        "SLURM_TASK_PID": os.getpid(),
    }
    if cpus := env.get("SLURM_CPUS_PER_TASK"):
        values["SLURM_CPUS_PER_TASK"] = max(1, int(cpus) // place.local_world_size)
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
        """Wait for a value; raise TimeoutError after EXCHANGE."""
        end = time.monotonic() + EXCHANGE.total_seconds()
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
        """Whether all these values exist."""
        return all((self._folder / quote(key, "")).exists() for key in keys)


def _store(env: Mapping[str, str], folder: Path) -> Store:
    """Connect to the store of the ranks' parents; a process group uses the same one."""
    if importlib.util.find_spec("torch") is None:
        return Files(folder, env["RANK"])
    from torch.distributed import PrefixStore, TCPStore

    place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    server = TCPStore(*place, is_master=False, timeout=EXCHANGE, wait_for_workers=False)
    return PrefixStore("rollcall/ranks", server)


def _addresses(env: Mapping[str, str], folder: Path) -> Sequence[str]:
    """Exchange an address and a free port of each rank."""
    head, store = env["MASTER_ADDR"], _store(env, folder)
    # On the head, the kernel's route to itself begins at that same address.
    own = head if head.startswith("127.") or head == "::1" else hosts.route(head).address
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((own, 0))
        port = probe.getsockname()[1]
        store.set(env["RANK"], f"[{own}]:{port}" if ":" in own else f"{own}:{port}")
        # Bound until all have chosen, so that no two ranks of a host choose the same port.
        return [store.get(str(rank)).decode() for rank in range(int(env["WORLD_SIZE"]))]
