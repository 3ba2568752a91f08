"""Who am I? Rank, local rank, world size, device, and the group of ranks that trains together.

The answer comes from whoever started the process, in this order: torchrun's variables, a Slurm step
(`srun`), Open MPI (`mpirun`), or nothing: then the process is alone.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from train import hosts
from train.config import ConfigError

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks.

    `nodes` holds the hosts of the step in rank order where the launcher tells them; `key` names the
    job, so that all its ranks derive the same port from it.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: tuple[str, ...] = ()
    key: str = ""


def find_place(env: Mapping[str, str]) -> Place:
    """Read the place of this process from its environment.

    Raises:
        ConfigError: only half of a launcher's variables are set, or they contradict each other.
    """
    if any(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        place = _from_torchrun(env)
    # SLURM_* alone prove nothing: shells inside salloc carry them. Only a step has a step id.
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        place = _from_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _from_open_mpi(env)
    else:
        place = Place("one process")
    _check(place, env)
    return place


def _from_torchrun(env: Mapping[str, str]) -> Place:
    missing = [name for name in TORCHRUN if name not in env]
    if missing:
        present = [name for name in TORCHRUN if name in env]
        raise ConfigError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: a rank needs "
            f"all of them; start it with torchrun, srun or mpirun, or unset {', '.join(present)}"
        )
    return Place(
        "torchrun",
        rank=_number(env, "RANK"),
        local_rank=_number(env, "LOCAL_RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1,
    )


def _from_slurm(env: Mapping[str, str]) -> Place:
    nodes = hosts.expand(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    # "2(x3),1" lists the tasks of each node; the node's own count is all a rank needs.
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return Place(
        "srun",
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_world_size=counts[_number(env, "SLURM_NODEID")],
        nodes=tuple(nodes),
        key=f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}",
    )


def _from_open_mpi(env: Mapping[str, str]) -> Place:
    return Place(
        "mpirun",
        rank=_number(env, "OMPI_COMM_WORLD_RANK"),
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=_number(env, "OMPI_COMM_WORLD_SIZE"),
        local_world_size=_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        nodes=tuple(hosts.expand(env.get("SLURM_JOB_NODELIST", ""))),
        # The job's own number: the same in all its processes, another in the next mpirun.
        key=env.get("PMIX_NAMESPACE", "") + env.get("OMPI_MCA_ess_base_jobid", ""),
    )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise ConfigError(f"{name} is not set, though its launcher's other variables are") from None
    except ValueError:
        raise ConfigError(f"{name}={env[name]} is not a whole number") from None


def _check(place: Place, env: Mapping[str, str]) -> None:
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(
            f"rank {place.rank} does not exist in a world of {place.world_size} "
            f"({place.launcher} said so): ranks run from 0 to world_size - 1"
        )
    expected = env.get("ROLLCALL_WORLD_SIZE")
    if expected and int(expected) != place.world_size:
        raise ConfigError(
            f"rank {place.rank} on {socket.gethostname()} found a world of {place.world_size} "
            f"ranks, but {expected} were started: some nodes did not meet; see their logs"
        )


class World:
    """All ranks that train together, and this one's place among them.

    Attributes:
        rank, local_rank, world_size: as torchrun defines them.
        device: where this rank computes.
        host: name of this machine.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.world_size = place.world_size
        self.device = device
        self.host = socket.gethostname()

    @classmethod
    def join(cls, device: str = "auto") -> World:
        """Meet the other ranks: gloo on CPU, NCCL (and gloo for host data) on GPUs.

        Args:
            device: auto, cpu or cuda.

        Raises:
            ConfigError: the environment or the device cannot work, or the ranks did not meet.
        """
        place = find_place(os.environ)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, hosts.usable_cpus() // place.local_world_size))
        world = cls(place, pick_device(device, place, os.environ))
        _warn_of_idle_nodes(place)
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        if place.world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            return world
        try:
            dist.init_process_group(
                backend,
                store=None if place.launcher == "torchrun" else _meet(place),
                rank=place.rank,
                world_size=place.world_size,
                timeout=JOIN_TIMEOUT,
            )
        except hosts.HostError as error:
            raise ConfigError(f"rank {place.rank}: {error}") from error
        except dist.DistError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ConfigError(
                f"rank {place.rank} on {world.host} did not meet the other ranks of "
                f"{place.world_size} at {address}: {error}"
            ) from error
        return world

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """The source rank's text, on every rank (as bytes: nothing from a peer is unpickled)."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        return bytes(data.tolist()).decode()

    def raise_together(self, problem: str) -> None:
        """Raise on every rank if any of them met a problem, so that none waits for the others.

        Args:
            problem: what this rank met, or nothing.

        Raises:
            ConfigError: the problem of the first rank that met one.
        """
        first = self.first_problem(problem)
        if first:
            raise ConfigError(first)

    def first_problem(self, problem: str) -> str:
        """The problem of the first rank that met one, on every rank; nothing if none did."""
        first = torch.tensor([self.rank if problem else self.world_size])
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if first.item() == self.world_size:
            return ""
        return self.broadcast_text(problem, int(first))

    def has_any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set; every rank must call it."""
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags)
        return bool(flags)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(torch.zeros(1))

    def leave(self) -> None:
        """End the group; every rank must call it after the last collective."""
        dist.destroy_process_group()


def pick_device(wanted: str, place: Place, env: Mapping[str, str]) -> torch.device:
    """The device of this rank, made current if it is a GPU.

    Raises:
        ConfigError: no GPU where one was asked for or allocated, or none for this local rank.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        allocated = env.get("CUDA_VISIBLE_DEVICES", "")
        if wanted == "auto" and allocated in ("", "-1", "NoDevFiles"):
            return torch.device("cpu")
        reason = f"CUDA_VISIBLE_DEVICES={allocated}" if wanted == "auto" else "device=cuda"
        raise ConfigError(
            f"{reason} promises GPUs, but torch {torch.__version__} on {socket.gethostname()} "
            "sees none: check `nvidia-smi` and the torch build, or say device=cpu"
        )
    index = place.local_rank
    # With --gpus-per-task Slurm shows each task its own GPU alone, as number 0.
    masked = place.launcher == "srun" and int(env.get("SLURM_GPUS_ON_NODE", 0)) > count
    if count == 1 and masked:
        index = 0
    if index >= count:
        raise ConfigError(
            f"LOCAL_RANK {index} on {socket.gethostname()} has no GPU: {count} visible, "
            f"{place.local_world_size} ranks on this node; start at most {count}, or say device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _warn_of_idle_nodes(place: Place) -> None:
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if place.launcher == "one process" and nodes != "1":
        print(
            f"rollcall: this job has {nodes} nodes, but one process alone trains: "
            "start it with srun, or use slurm/multi_node.sbatch",
            file=sys.stderr,
        )


def _meet(place: Place) -> dist.Store:
    """The store of ranks that no torchrun started: on rank 0's host, at a port from the job.

    It listens on the address that the other ranks use, and not on all.
    """
    one_node = place.local_world_size == place.world_size
    peers = [node for node in place.nodes if node != socket.gethostname()]
    own = hosts.Route("127.0.0.1", "lo") if one_node else None
    if peers and not one_node:
        own = hosts.route(peers[0])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", own.interface)
    port = int(os.environ.setdefault("MASTER_PORT", str(hosts.port(place.key))))
    listener = None
    if "MASTER_ADDR" not in os.environ:
        if own is None:
            raise ConfigError(
                f"{place.launcher} started ranks on several hosts and did not name the first: "
                "pass its address, for instance mpirun -x MASTER_ADDR=10.0.0.1"
            )
        # Not by its name on the head itself, which may be 127.0.1.1 there (Debian).
        on_head = one_node or place.nodes[0] == socket.gethostname()
        os.environ["MASTER_ADDR"] = own.address if on_head else place.nodes[0]
        if place.rank == 0:
            listener = _listen(own.address, port)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=listener,
    )


def _listen(address: str, port: int) -> int:
    """The descriptor of a socket that listens there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}; set MASTER_PORT to "
            "another port, the same for all ranks"
        ) from None
