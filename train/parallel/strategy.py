"""The model spread over the mesh: parts applied one after the other, and the step over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict

from train import optim
from train.config import Config, ConfigError
from train.data.source import Batch
from train.parallel.assembly import parts, weights_mesh
from train.parallel.gradients import by_mesh, clip
from train.parallel.mesh import NODE
from train.parallel.part import MakeOptimizer, local_bytes, size
from train.parallel.pipeline import Pipeline
from train.parallel.shard import local_optimizer
from train.precision import autocast
from train.world import World

PerSampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Flat optimizer names (state.<parameter>.<quantity>) are the same for every strategy and mesh.
OPTIONS = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
ONE = {
    "replicate": "replica",
    "shard": "shard",
    "context": "piece of the sequences",
    "tensor": "tensor part",
    "pipeline": "pipeline part",
}
MANY = {"context": "pieces of the sequences"}


class Composed:
    """A model and the parts that spread it; answers the protocol `Strategy`."""

    def __init__(self, config: Config, world: World, loss: PerSampleLoss) -> None:
        """Form the mesh.

        Raises:
            ConfigError: its degrees do not fit the world size, the model or the batch.
        """
        self.world = world
        self.stream = world.rank
        self.degrees = config.parallel.degrees(world.world_size, _node_size(config, world))
        # Ranks that hold one replica compute the same samples: its stages, the parts of its layers,
        # the pieces of its sequences. Tensor parts are neighbours, then pieces, then shares.
        copies, pieces = self.degrees.get("tensor", 1), self.degrees.get("context", 1)
        stages = self.degrees.get("pipeline", 1)
        self.data_ranks = world.world_size // copies // pieces // stages
        self.data_rank, copy = divmod(
            world.rank % (self.data_ranks * pieces * copies), pieces * copies
        )
        if self.data_ranks > config.data.global_batch:
            raise ConfigError(
                f"data.global_batch={config.data.global_batch} leaves some of {self.data_ranks} "
                f"shares of the batch without a sample: take at least {self.data_ranks}"
            )
        self._mesh = mesh = weights_mesh(self.degrees, world)
        self._stage = config.parallel.stage
        self._pipeline: Pipeline | None = None
        if mesh and stages > 1:
            share = math.ceil(config.data.global_batch / self.data_ranks)
            self._pipeline = Pipeline(mesh["pipeline"], config, world, share)
        self._parts = parts(config, world, self.degrees, mesh)
        self._averaged = self.data_ranks * pieces  # by the parts: ranks with replicas of weights
        self._counts_loss = copy % copies == 0  # each number once in sums over all ranks
        self._precision, self._optim = config.precision, config.optim
        self._loss = loss
        self._model: nn.Module  # under its own names: parameters and state
        self._callables: list[nn.Module]  # what the parts made of it, or of each stage of it

    @property
    def shares(self) -> tuple[range, int]:
        """One share for each data rank."""
        return range(self.data_rank, self.data_rank + 1), self.data_ranks

    def rows(self, batch: int) -> range:
        """An equal share for each data rank; the last ones' may reach into padding."""
        share = math.ceil(batch / self.data_ranks)
        if self._pipeline:
            share = self._pipeline.padded(share)
        return range(self.data_rank * share, (self.data_rank + 1) * share)

    def place(self, model: nn.Module, example: Batch) -> None:
        """Take the model to the device and apply the parts."""
        for part in self._parts:
            part.check(model, example)
        self._whole = sum(parameter.nbytes for parameter in model.parameters())
        self._model, modules = model, [model]
        if self._pipeline:
            modules = self._pipeline.cut(model, example.inputs[:1])
        if not any(part.places for part in self._parts):
            model.to(self.world.device)
        for part in self._parts:
            part.apply(model)
        for part in self._parts:
            modules = [part.wrap(module) for module in modules]
        self._callables = modules

    def settle(self, example: Batch) -> None:
        """The backward passes that parts need before the first step; they leave nothing."""
        example = example.to(self.world.device)
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        for _ in range(max((part.warm_ups for part in self._parts), default=0)):
            self.forward_backward([example], len(example.weights))
            self._model.zero_grad()
        for buffer, before in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def describe(self) -> str:
        """Computed from the mesh and the placed model."""
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        product = " × ".join(
            f"{degree} {ONE[name] if degree == 1 else MANY.get(name, f'{ONE[name]}s')}"
            for name, degree in self.degrees.items()
        )
        sentences = [part.describe(self._model) for part in self._parts]
        if self._pipeline:
            sentences.insert(0, self._pipeline.describe())
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
        groups = by_mesh(self._model.parameters())
        return make([part for group in groups for part in optim.groups(self._optim, group)])

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Accumulate the gradient of the summed loss over `count`, micro-batch by micro-batch.

        Summing and dividing by the count of the whole step makes the result independent of how
        the batch was cut. Parts average over the data ranks, which the scale takes back.
        """
        scale = self._averaged / count
        micro_batches = [self._share(batch) for batch in micro_batches]
        if self._pipeline:
            with self._around(last=True), autocast(self._precision, self.world.device):
                total = self._pipeline.forward_backward(
                    self._callables, micro_batches, self._sum_of_losses, scale
                )
        else:
            total = torch.zeros((), device=self.world.device)
            for number, batch in enumerate(micro_batches):
                with self._around(last=number == len(micro_batches) - 1):
                    with autocast(self._precision, self.world.device):
                        outputs = self._callable(batch.inputs)
                    loss = self._sum_of_losses(outputs, batch)
                    (loss * scale).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        for part in self._parts:
            part.finish(self._model)
        return total * self._counts_loss

    @property
    def model(self) -> nn.Module:
        """What this rank holds of the placed model."""
        return self._model

    @property
    def _callable(self) -> nn.Module:
        """What is called where there is no pipeline."""
        return self._callables[0]

    def _share(self, batch: Batch) -> Batch:
        for part in self._parts:
            batch = part.share(batch)
        return batch

    @contextmanager
    def _around(self, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.around(last))
            yield

    def _sum_of_losses(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return (self._loss(outputs.float(), batch.targets) * batch.weights).sum()

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:
        """The outputs of the model in evaluation mode: (rows, …, classes), fp32."""
        self._model.eval()
        inputs = self._share(batch).inputs
        with self._around(last=True), autocast(self._precision, self.world.device):
            outputs: torch.Tensor = (
                self._pipeline.forward(self._callables, inputs)
                if self._pipeline
                else self._callable(inputs)
            )
        self._model.train()
        for part in self._parts:
            outputs = part.gather(outputs)
        return outputs.float()

    def clip(self, max_norm: float | None, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Exact on every mesh."""
        group = self._pipeline.group if self._pipeline else None
        return clip(self._model.parameters(), max_norm, group, divisor)

    def rejoin(self) -> bool:
        """Part by part; a pipeline cannot."""
        if self._pipeline or not all(part.rejoin(self._model) for part in self._parts):
            return False
        weight = next(weight for weight in self._model.parameters() if weight.requires_grad)
        weight.grad = torch.full_like(weight, torch.nan)
        return True

    def forget(self) -> None:
        """Part by part."""
        for part in self._parts:
            part.forget()

    @property
    def replicas(self) -> list[list[int]]:
        """Those that differ only in dimensions that do not divide weights."""
        if self._mesh is None:
            return []
        whole = {"replicate", "shard"} if self._stage == 1 else {"replicate"}
        names, grid = self._mesh.mesh_dim_names or (), self._mesh.mesh
        order = sorted(range(len(names)), key=lambda place: names[place] in whole)
        alike = math.prod(grid.shape[place] for place in order if names[place] in whole)
        groups: list[list[int]] = grid.permute(order).reshape(-1, alike).tolist()
        return groups

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Over all ranks; what ranks of one replica compute alike counts once for each."""
        total = torch.stack(list(terms)).sum(0)
        dist.all_reduce(total)
        return total

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
