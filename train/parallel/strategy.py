"""The model spread over the mesh: parts applied one after the other, and the step over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.config import Config, ConfigError
from train.data.source import Batch
from train.parallel.gradients import by_mesh, clip
from train.parallel.mesh import DIMENSIONS, NODE
from train.parallel.part import MakeOptimizer, Part, local_bytes, size
from train.parallel.pipeline import Pipeline
from train.parallel.replicate import Replicate, Threads
from train.parallel.shard import Shard, ShardOptimizer, local_optimizer
from train.parallel.tensor import Tensor
from train.precision import autocast
from train.world import World

PerSampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Flat optimizer names (state.<parameter>.<quantity>) are the same for every strategy and mesh.
OPTIONS = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


class Composed:
    """A model and the parts that spread it; answers the protocol `Strategy`."""

    def __init__(self, config: Config, world: World, loss: PerSampleLoss) -> None:
        """Form the mesh.

        Raises:
            ConfigError: its degrees do not fit the world size, the model or the batch.
        """
        self.world = world
        self.degrees = config.parallel.degrees(world.world_size, _node_size(config, world))
        # Ranks of one tensor group are neighbours and compute the same samples, as do all stages.
        copies, stages = self.degrees.get("tensor", 1), self.degrees.get("pipeline", 1)
        self.data_ranks = world.world_size // copies // stages
        self.data_rank, copy = divmod(world.rank % (self.data_ranks * copies), copies)
        if self.data_ranks > config.data.global_batch:
            raise ConfigError(
                f"data.global_batch={config.data.global_batch} leaves some of {self.data_ranks} "
                f"shares of the batch without a sample: take at least {self.data_ranks}"
            )
        mesh = _mesh(self.degrees, world)
        self._pipeline: Pipeline | None = None
        if mesh and "pipeline" in self.degrees:
            share = math.ceil(config.data.global_batch / self.data_ranks)
            self._pipeline = Pipeline(mesh["pipeline"], config, share)
        self._parts = parts(config, world, mesh)
        self._counts_loss = copy == 0  # each sample once in sums over all ranks
        self._precision = config.precision
        self._loss = loss
        self._model: nn.Module  # under its own names: parameters and state
        self._callable: nn.Module  # what the parts made of it, perhaps a wrapper

    def rows(self, batch: int) -> range:
        """An equal share for each data rank; the last ones' may reach into padding."""
        share = math.ceil(batch / self.data_ranks)
        if self._pipeline:
            share = self._pipeline.padded(share)
        return range(self.data_rank * share, (self.data_rank + 1) * share)

    def place(self, model: nn.Module, example: Batch) -> None:
        """Take the model to the device, apply the parts, and let them settle."""
        self._whole = sum(parameter.nbytes for parameter in model.parameters())
        if self._pipeline:
            model = self._pipeline.cut(model, example.inputs[:1])
        self._model = self._callable = model.to(self.world.device)
        for part in self._parts:
            self._callable = part.apply(self._callable)
        example = Batch(*(tensor.to(self.world.device) for tensor in example))
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        for _ in range(max((part.warm_ups for part in self._parts), default=0)):
            self.forward_backward([example], len(example.weights))
            self._model.zero_grad()
        for buffer, before in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def describe(self) -> str:
        """Computed from the mesh and the placed model."""
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        names = {
            "replicate": "replica",
            "shard": "shard",
            "tensor": "tensor part",
            "pipeline": "stage",
        }
        product = " × ".join(
            f"{degree} {names[name]}{'s' * (degree != 1)}" for name, degree in self.degrees.items()
        )
        sentences = [part.describe(self._model) for part in self._parts]
        if self._pipeline:
            sentences.insert(0, self._pipeline.describe(self._model))
        return " ".join(
            [
                f"{ranks}{' = ' * bool(product)}{product}; rank {self.world.rank} holds "
                f"{size(local_bytes(self._model))} of {size(self._whole)} of weights.",
                *filter(None, sentences),
            ]
        )

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """One group of parameters for each mesh, since fused updates cannot mix them."""
        for part in self._parts:
            make = part.optimizer(make)
        return make([{"params": group} for group in by_mesh(self._model.parameters())])

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Accumulate the gradient of the summed loss over `count`, micro-batch by micro-batch.

        Summing and dividing by the count of the whole step makes the result independent of how
        the batch was cut. Parts average over the data ranks, which the scale takes back.
        """
        scale = self.data_ranks / count
        if self._pipeline:
            with autocast(self._precision, self.world.device):
                total = self._pipeline.forward_backward(
                    self._callable, micro_batches, self._sum_of_losses, scale
                )
            return total * self._counts_loss
        total = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with ExitStack() as stack:
                for part in self._parts:
                    stack.enter_context(part.accumulating(last))
                with autocast(self._precision, self.world.device):
                    outputs = self._callable(batch.inputs)
                loss = self._sum_of_losses(outputs, batch)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total * self._counts_loss

    def _sum_of_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return (self._loss(outputs.float(), batch.targets) * batch.weights).sum()

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:
        """The outputs of the model in evaluation mode: (rows, classes), fp32."""
        self._model.eval()
        with autocast(self._precision, self.world.device):
            outputs: torch.Tensor = (
                self._pipeline.forward(self._callable, batch.inputs)
                if self._pipeline
                else self._callable(batch.inputs)
            )
        self._model.train()
        return outputs.float()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Exact on every mesh."""
        group = self._pipeline.group if self._pipeline else None
        return clip(self._model.parameters(), max_norm, group)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer under the names of the plain model."""
        model, optim = state_dict.get_state_dict(
            self._model, local_optimizer(optimizer), options=OPTIONS
        )
        return {"model": model, "optim": optim}

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load both in place."""
        state_dict.set_state_dict(
            self._model,
            local_optimizer(optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=OPTIONS,
        )


def _mesh(degrees: dict[str, int], world: World) -> DeviceMesh | None:
    """The mesh from which every part takes its dimension; none for no dimensions."""
    if not degrees:
        return None
    if "replicate" in degrees and ("tensor" in degrees or "pipeline" in degrees):
        # DDP cannot hold the DTensors of cut layers, and its buckets break in a pipeline of two
        # micro-batches (torch 2.15); FSDP can do both, and one shard is a replica.
        degrees = {name: degrees.get(name, 1) for name in DIMENSIONS}
    return init_device_mesh(
        world.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
    )


def parts(config: Config, world: World, mesh: DeviceMesh | None) -> list[Part]:
    """What spreads the model, or a stage of it, over the other dimensions, in order.

    Raises:
        ConfigError: a part does not fit the model.
    """
    options = config.parallel
    if options.strategy == "dp":
        return [Threads()]
    if not mesh:
        return []
    degrees = mesh.mesh_dim_names or ()
    found: list[Part] = []
    if "tensor" in degrees:
        found.append(Tensor(mesh["tensor"], config.model))
    data = tuple(name for name in degrees if name in ("replicate", "shard"))
    if "shard" in degrees and options.stage > 1:
        found.append(Shard(mesh[data], options.stage, options.offload))
    elif data:
        found.append(Replicate(options, world.device))
    if "shard" in degrees and options.stage == 1:
        found.append(ShardOptimizer(mesh["shard"]))
    return found


def _node_size(config: Config, world: World) -> int:
    """Ranks of one node, if the mesh needs it; then all nodes must have equally many."""
    mine = world.place.local_world_size
    if NODE not in config.parallel.mesh_text:
        return mine
    first = int(world.broadcast_text(str(mine)))
    world.raise_together(
        ""
        if mine == first
        else f"rank {world.rank} is on a node of {mine} ranks, rank 0 on one of {first}: "
        f"the mesh {config.parallel.mesh_text} needs equally many on every node"
    )
    return mine
