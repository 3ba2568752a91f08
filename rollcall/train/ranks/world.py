"""Find this process's rank, world size and device, and join the other ranks.

The environment says who started the process: torchrun, a Slurm step (`srun`) or Open MPI
(`mpirun`), in this order. With none of them the process is alone.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollcall.config import ConfigError
from rollcall.messages.refusal import refusing
from rollcall.system import fabric, guard, hosts
from rollcall.system.process import die_with_parent
from rollcall.train import torch_private
from rollcall.train.ranks.members import REPLACES, SPARES, Members
from rollcall.train.ranks.signals import await_lost_node
from rollcall.train.torch_private import BatchNorm

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=5)
NAME = 64
"""Bytes of a host's name that ranks exchange."""


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks."""

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: tuple[str, ...] = ()  # the hosts of the step in rank order, if the launcher names them
    key: str = ""  # names the job; all its ranks derive the same port from it


def find_place(env: Mapping[str, str]) -> Place:
    """Read this process's place from its environment; ConfigError if that contradicts itself."""
    if any(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        place = _from_torchrun(env)
    # Other SLURM_* variables do not prove a step: a shell inside salloc has them too.
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        place = _from_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _from_open_mpi(env)
    else:
        place = Place("one process")
    _check(place, env)
    return place


def _from_torchrun(env: Mapping[str, str]) -> Place:
    if missing := [name for name in TORCHRUN if name not in env]:
        present = ", ".join(name for name in TORCHRUN if name in env)
        advice = f"start ranks with torchrun, srun or mpirun, or unset {present} to train alone"
        raise ConfigError(f"the environment has {present} but not {', '.join(missing)}; {advice}")
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    rank, local_rank, size, local_size = _numbers({"LOCAL_WORLD_SIZE": "1", **env}, *names)
    return Place("torchrun", rank, local_rank, size, local_size)


def _from_slurm(env: Mapping[str, str]) -> Place:
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    nodes = hosts.of_step({**env, "SLURM_STEP_NODELIST": listed})
    # "2(x3),1" lists the tasks of each node: 2, 2, 2, 1.
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"
    rank, local_rank, size, node = _numbers(env, *names)
    key = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    return Place("srun", rank, local_rank, size, counts[node], tuple(nodes), key)


def _from_open_mpi(env: Mapping[str, str]) -> Place:
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
    rank, local_rank, size, local_size = _numbers(env, *names)
    nodes = tuple(hosts.expand(env.get("SLURM_JOB_NODELIST", "")))
    # The same in all processes of this mpirun, different in the next one.
    key = env.get("PMIX_NAMESPACE", "") + env.get("OMPI_MCA_ess_base_jobid", "")
    return Place("mpirun", rank, local_rank, size, local_size, nodes, key)


def _numbers(env: Mapping[str, str], *names: str) -> Iterator[int]:
    for name in names:
        if name not in env:
            raise ConfigError(f"{name} is not set, although other variables of its launcher are")
        try:
            yield int(env[name])
        except ValueError:
            raise ConfigError(f"{name}: expected a whole number, got '{env[name]}'") from None


def _check(place: Place, env: Mapping[str, str]) -> None:
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(
            f"{place.launcher} started rank {place.rank} in a world of {place.world_size} ranks; "
            f"expected a rank from 0 to {place.world_size - 1}"
        )
    expected = env.get("ROLLCALL_WORLD_SIZE")
    if expected and int(expected) != place.world_size:
        raise ConfigError(
            f"rank {place.rank} on {socket.gethostname()} found a world of {place.world_size} "
            f"ranks, but {expected} were started: some nodes did not join; see their logs"
        )


class World:
    """All ranks that train together, and this rank's place among them (numbers as in torchrun)."""

    joined: ClassVar[World | None] = None
    """The world of this process between `join` and `leave`."""

    def __init__(self, place: Place | None = None, device: torch.device | None = None) -> None:
        if not (isinstance(place, Place) and isinstance(device, torch.device)):
            raise ConfigError("World(): write World.join(), which finds and joins the other ranks")
        self.place, self.device = place, device
        self.rank, self.local_rank = place.rank, place.local_rank
        self.world_size = place.world_size
        self.host = socket.gethostname()
        self.members: Members | None = None  # who knows which ranks are lost and back, if anybody

    @classmethod
    def join(cls, device: str = "auto") -> World:
        """Join the other ranks, with gloo, on GPUs also NCCL; ConfigError if that is impossible."""
        place = find_place(os.environ)
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
            # Batches of changing sizes, and smaller ones after a lack of memory, leave gaps.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if "ROLLCALL_WORLD_SIZE" in os.environ:
            await_lost_node()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()  # if torchrun itself is killed
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, hosts.usable_cpus() // place.local_world_size))
        world = World.joined = cls(place, pick_device(device, place, os.environ))
        nodes, tasks = (os.environ.get(f"SLURM_{it}", "1") for it in ("JOB_NUM_NODES", "NTASKS"))
        if place.launcher == "one process" and (nodes, tasks) != ("1", "1"):
            print(
                f"rollcall: warning: this job has {nodes} nodes and {tasks} tasks, but only one "
                "process trains; start it with srun, or use slurm/multi_node.sbatch",
                file=sys.stderr,
            )
        if os.environ.get(SPARES) and world.device.type == "cpu":
            world.members = Members(place.rank, place.world_size)
            if REPLACES in os.environ:
                return world.again()
        given: dict[str, Any] = {"backend": "gloo"}
        if world.device.type == "cuda":  # NCCL connects now, also for the groups of a mesh
            given = {"backend": "cpu:gloo,cuda:nccl", "device_id": world.device}
        if place.world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **given)
            return world
        given |= {"rank": place.rank, "world_size": place.world_size, "timeout": JOIN_TIMEOUT}
        try:
            store = None if place.launcher == "torchrun" else _meet(place)
            dist.init_process_group(store=store, **given)
        except hosts.HostError as error:
            raise ConfigError(f"rank {place.rank}: {error}") from error
        except dist.DistError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ConfigError(
                f"rank {place.rank} on {world.host} could not join the other ranks of "
                f"{place.world_size} at {address}: {error}"
            ) from error
        return world

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes and prints for all."""
        return self.rank == 0

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """Return the source rank's text on every rank; no data from a peer is unpickled."""
        if self.world_size == 1:
            return text
        data = torch.from_numpy(np.frombuffer(os.fsencode(text), np.uint8).copy())
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        return os.fsdecode(data.numpy().tobytes())

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the source rank's value on every rank: one that JSON can hold."""
        return json.loads(self.broadcast_text(json.dumps(value), source))

    def raise_together(self, problem: str) -> None:
        """Raise ConfigError on every rank if `problem` is not empty on one: no rank waits."""
        if first := self.first_problem(problem):
            raise ConfigError(first)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise a ConfigError of this context on every rank if it is raised on one."""
        problem = ""
        try:
            yield
        except ConfigError as error:
            problem = str(error)
        self.raise_together(problem)

    def first_problem(self, problem: str) -> str:
        """Return, on every rank, the problem of the first rank that has one, or an empty string."""
        if self.world_size == 1:
            return problem
        first = torch.tensor([self.rank if problem else self.world_size])
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if first.item() == self.world_size:
            return ""
        return self.broadcast_text(problem, int(first))

    def has_any(self, flag: bool) -> bool:
        """Return True if the flag of any rank is set; every rank must call this."""
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags)
        return bool(flags)

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each number over all ranks, which must call this together."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, of the same shape: (world_size, *mine.shape)."""
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine)
        return torch.stack(every)

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, each cut after NAME bytes."""
        data = torch.tensor([*text.encode()[:NAME].ljust(NAME)], dtype=torch.uint8)
        return [bytes(row).decode(errors="replace").strip() for row in self.gather(data).tolist()]

    def replicate(self, model: nn.Module) -> DistributedDataParallel:
        """Move a model to this rank's device, and average its gradients over all ranks.

        It starts with the weights of rank 0. After each pass in training with gradients, all ranks
        have rank 0's statistics of BatchNorm, so that they evaluate and save the same model.
        """
        copy_sparse_gradients(model.to(self.device))
        devices = [self.device] if self.device.type == "cuda" else None
        # Buffers are not sent: ranks may evaluate different numbers of batches.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        new = "forward_sync_buffers"  # its name from torch 2.15 on
        options: dict[str, Any] = {new if new in known else "broadcast_buffers": False}
        return _Replica(model, device_ids=devices, **options)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.all_reduce(torch.zeros(1))

    def again(self) -> World:
        """Return the world of the ranks that take part now; see `Members.meet`."""
        assert self.members is not None
        if dist.is_initialized():
            torch_private.abort()
        hook, group = sys.excepthook, self.members.meet()  # which adds a hook each time
        World.joined = World(replace(self.place, **group), self.device)
        torch_private.set_timeout(JOIN_TIMEOUT)
        World.joined.members, sys.excepthook = self.members, hook
        return World.joined

    def leave(self) -> None:
        """End the process group; every rank must call this after the last collective."""
        dist.destroy_process_group()
        World.joined = None


def copy_sparse_gradients(model: nn.Module) -> None:
    """Copy sparse gradients: DDP divides them in place, but other layers share their memory."""
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    for weight in (layer.weight for layer in layers if layer.sparse):
        if weight.requires_grad:
            weight.register_hook(torch.clone)  # type: ignore[no-untyped-call]


class _Replica(DistributedDataParallel):
    """A replica with the statistics of BatchNorm of rank 0."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        if self.training and self.require_backward_grad_sync and torch.is_grad_enabled():
            layers = [layer for layer in self.module.modules() if isinstance(layer, BatchNorm)]
            pairs = [(layer.running_mean, layer.running_var) for layer in layers]
            tensors = [tensor for pair in pairs for tensor in pair if tensor is not None]
            if tensors:
                vector = torch.cat(tensors)
                dist.broadcast(vector, 0)
                parts = torch.split(vector, [*map(len, tensors)])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.data.copy_(part)  # the backward pass holds it, but does not use it
        return outputs


def pick_device(wanted: str, place: Place, env: Mapping[str, str]) -> torch.device:
    """Return this rank's device, now the current one; ConfigError if torch sees no GPU for it."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={wanted}: expected auto, cpu or cuda")
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        allocated = env.get("CUDA_VISIBLE_DEVICES", "")
        if wanted == "auto" and allocated in ("", "-1", "NoDevFiles"):
            return torch.device("cpu")
        reason = f"CUDA_VISIBLE_DEVICES={allocated}" if wanted == "auto" else "device=cuda"
        advice = "check `nvidia-smi` and the torch build, or set device=cpu"
        raise ConfigError(
            f"{reason} asks for GPUs, but torch {torch.__version__} on {socket.gethostname()} "
            f"sees none: {advice}"
        )
    # With --gpus-per-task each task sees only its own GPU, as number 0.
    masked = place.launcher == "srun" and int(env.get("SLURM_GPUS_ON_NODE", 0)) > count
    index = 0 if count == 1 and masked else place.local_rank
    if index >= count:
        raise ConfigError(
            f"LOCAL_RANK {index} on {socket.gethostname()} has no GPU: {count} visible, "
            f"{place.local_world_size} ranks on this node; start at most {count}, or set device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meet(place: Place) -> dist.Store:
    """Return the store for ranks without torchrun; it listens only where other ranks connect."""
    one_node = place.local_world_size == place.world_size
    peers = [node for node in place.nodes if node != socket.gethostname()]
    own = hosts.Route("127.0.0.1", "lo") if one_node else None
    if peers and not one_node:
        own = hosts.route(peers[0])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", own.interface)
        os.environ.update(fabric.settings(os.environ))
    port = int(os.environ.setdefault("MASTER_PORT", str(hosts.port(place.key))))
    listener = None
    if "MASTER_ADDR" not in os.environ:
        if own is None:
            raise ConfigError(
                f"{place.launcher} started ranks on several hosts but did not name the first host; "
                "pass its address, for example mpirun -x MASTER_ADDR=10.0.0.1"
            )
        # On the first host itself its name may resolve to 127.0.1.1 (Debian).
        on_head = one_node or place.nodes[0] == socket.gethostname()
        os.environ["MASTER_ADDR"] = own.address if on_head else place.nodes[0]
        if place.rank == 0:
            listener = _listen(own.address, port)
    server = os.environ["MASTER_ADDR"], port, place.world_size, place.rank == 0
    return dist.TCPStore(*server, timeout=JOIN_TIMEOUT, master_listen_fd=listener)


def _listen(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    advice = "; set MASTER_PORT to another port, the same for all ranks"
    with refusing(f"rank 0 cannot listen on {address}:{port}", advice):
        return guard.listen(socket.create_server((address, port), family=family)).detach()
