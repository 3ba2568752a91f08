"""Each rank holds stages of consecutive layers, and micro-batches run from stage to stage."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from train.config import Config
from train.data.source import Batch
from train.parallel import schedules
from train.parallel.layers import balance, groups_of, remove, span
from train.schema import ConfigError
from train.world import World


class Pipeline:
    """Who computes which layers, and how a step runs through them.

    Attributes:
        group: the ranks that make up one model.
        stages: of the whole model.
        mine: numbers of this rank's stages.
    """

    def __init__(self, mesh: DeviceMesh, config: Config, world: World, share: int) -> None:
        """Divide a share of the batch into micro-batches of one size.

        Args:
            share: samples of a step that these ranks compute.

        Raises:
            ConfigError: the schedule cannot run so few, or not with this torch.
        """
        self.group = mesh.get_group()
        self._options, self._world = config.parallel, world
        self._name = config.parallel.schedule_name
        schedules.check_version(self._name)
        self._schedule = schedules.SCHEDULES[self._name]
        self._ranks = mesh.size()
        self._per_rank = config.parallel.stages_per_rank if self._schedule.looped else 1
        self._owners = schedules.owners(self._schedule, self._ranks, self._per_rank)
        self.stages = len(self._owners)
        self.mine = [
            stage for stage, rank in enumerate(self._owners) if rank == mesh.get_local_rank()
        ]
        self._micro_batch = schedules.micro_batch(
            config.parallel, config.data.micro_batch, share, self._ranks, self.stages
        )
        self._count = math.ceil(share / self._micro_batch)
        self._run: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def padded(self, share: int) -> int:
        """A share of the batch, filled up to whole micro-batches."""
        return math.ceil(share / self._micro_batch) * self._micro_batch

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stages - 1 in self.mine

    def cut(self, model: nn.Module, example: torch.Tensor) -> list[nn.Module]:
        """Leave this rank's layers in the model; return its stages, which are made of them.

        The largest work of a stage is as small as it can be.

        Args:
            example: inputs of one sample.

        Raises:
            ConfigError: the model is no sequence of layers, or has fewer with weights than stages.
        """
        groups = groups_of(model, example, self._world, self._options.balance)
        if len(groups) < self.stages:
            loops = f" with {self._per_rank} stages on each rank" if self._per_rank > 1 else ""
            most = len(groups) // self._per_rank
            nearest = f"pipeline={most}" if most else "parallel.schedule=1f1b"
            raise ConfigError(
                f"pipeline={self._ranks}{loops} makes {self.stages} stages, which is more than the "
                f"{len(groups)} layers with weights of this model: choose at most {nearest}"
            )
        bounds = balance([group.cost for group in groups], self.stages)
        self._sent = [groups[bound - 1].numbers for bound in bounds[1:-1]]
        self._names: list[str] = []
        found: list[nn.Module] = []
        for stage in range(self.stages):
            held = groups[bounds[stage] : bounds[stage + 1]]
            layers = [layer for group in held for layer in group.layers.items()]
            if stage in self.mine:
                self._names.append(span([name for name, _ in layers]))
                # The names within a stage are nobody's; a dot is not allowed.
                named = OrderedDict((name.replace(".", "_"), layer) for name, layer in layers)
                found.append(Stage(named))
            else:
                remove(model, [name for name, _ in layers])
        return found

    def describe(self) -> str:
        """The layers of this rank, and what goes from stage to stage."""
        sent = " and ".join(dict.fromkeys(map(str, self._sent)))
        return (
            f"Its layers are {' and '.join(self._names)}; between the stages {sent} numbers a "
            f"sample go forward and as many gradients back, {self._count} micro-batches a step "
            f"({self._name})."
        )

    def forward_backward(
        self,
        modules: Sequence[nn.Module],
        micro_batches: Sequence[Batch],
        loss: Callable[[torch.Tensor, Batch], torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Run a step.

        Args:
            modules: the stages of this rank, as they are called.
            loss: of outputs and their samples; called on the last stage.
            scale: of the losses whose gradient is left.

        Returns:
            The sum of the losses, not scaled; zero but on the rank of the last stage.
        """
        at_once = self._count
        runs = [Batch(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))]
        if self._name == "sequential":
            at_once, runs = 1, list(micro_batches)
        device = runs[0].weights.device
        if self._run is None:
            self._run = self._scheduled(modules, at_once, device)
        total = torch.zeros((), device=device)
        for batch in runs:
            self._loss = lambda outputs, rows, batch=batch: (  # type: ignore[misc]
                loss(outputs, Batch(*(part[rows] for part in batch))) * scale
            )
            # torch 2.11 wants the strides that it saw when it inferred shapes.
            inputs = (batch.inputs.contiguous(),) if 0 in self.mine else ()
            # The schedule cuts one target: rows, by which the loss finds targets and weights.
            rows = torch.arange(len(batch.weights), device=device) if self.has_outputs else None
            losses: list[torch.Tensor] = []
            self._run.step(*inputs, target=rows, losses=losses, return_outputs=False)
            total += sum(losses, torch.zeros((), device=device)).detach() / scale
        return total

    def _scheduled(
        self, modules: Sequence[nn.Module], count: int, device: torch.device
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        for module in modules:
            _ignore_trials(module)
        stages = [
            PipelineStage(module, stage, self.stages, device, group=self.group)
            for stage, module in zip(self.mine, modules, strict=True)
        ]
        run: PipelineScheduleSingle | PipelineScheduleMulti = self._schedule.run(
            stages if self._schedule.looped else stages[0],
            count,
            loss_fn=lambda outputs, rows: self._loss(outputs, rows),
            scale_grads=False,
        )
        return run

    def forward(self, modules: Sequence[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
        """The outputs, on every rank.

        One stage after the other sends to all: a schedule wants every batch as large as the first.
        """
        x = inputs
        mine = dict(zip(self.mine, modules, strict=True))
        for stage, owner in enumerate(self._owners):
            if stage in mine:
                x = mine[stage](x).float()
            x = self._broadcast(x, owner, stage in mine)
        return x

    def _broadcast(self, x: torch.Tensor, owner: int, is_mine: bool) -> torch.Tensor:
        shape = torch.zeros(8, dtype=torch.int64, device=x.device)
        shape[: x.ndim] = torch.tensor(x.shape)
        dist.broadcast(shape, group=self.group, group_src=owner)
        if not is_mine:
            x = torch.empty([size for size in shape.tolist() if size], device=x.device)
        x = x.contiguous()
        dist.broadcast(x, group=self.group, group_src=owner)
        return x


class Stage(nn.Sequential):
    """Layers one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the last one returns, but no view: schedules detach in place what was sent."""
        for layer in self:
            x = layer(x)
        return x.clone() if x._is_view() else x


def _ignore_trials(module: nn.Module) -> None:
    """Keep BatchNorm's statistics free of trials.

    torch 2.11 runs each stage on zeros, without gradients, to learn the shapes that it will send.
    """
    before: list[torch.Tensor] = []

    def keep(stage: nn.Module, _: object) -> None:
        if stage.training and not torch.is_grad_enabled():
            before.extend(buffer.clone() for buffer in stage.buffers())

    def put_back(stage: nn.Module, _: object, __: object) -> None:
        for buffer, kept in zip(stage.buffers(), before, strict=False):
            buffer.copy_(kept)
        before.clear()

    module.register_forward_pre_hook(keep)
    module.register_forward_hook(put_back)
