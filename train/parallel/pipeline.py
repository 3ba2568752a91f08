"""Each rank holds some consecutive layers, and micro-batches run from rank to rank.

GPipe, https://arxiv.org/abs/1811.06965; 1F1B, https://arxiv.org/abs/1806.03377.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.flop_counter import FlopCounterMode

from train.config import Config, ConfigError
from train.data.source import Batch

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """Who computes which layers, and how a step runs through them.

    Attributes:
        stage, stages: which part of the layers is this rank's, and of how many.
        group: the ranks that make up one model, in the order of their stages.
    """

    def __init__(self, mesh: DeviceMesh, config: Config, share: int) -> None:
        """Divide a share of the batch into micro-batches of one size.

        Args:
            share: samples of a step that these ranks compute.

        Raises:
            ConfigError: 1F1B has fewer micro-batches than stages.
        """
        self.group = mesh.get_group()
        self.stage, self.stages = mesh.get_local_rank(), mesh.size()
        self._schedule = config.parallel.schedule
        self._micro_batch = config.data.micro_batch or math.ceil(share / self.stages)
        self._count = math.ceil(share / self._micro_batch)
        self._run: PipelineScheduleSingle | None = None
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        if self._schedule == "1f1b" and self._count < self.stages:
            raise ConfigError(
                f"{share} samples in micro-batches of data.micro_batch={self._micro_batch} are "
                f"{self._count}, too few for 1f1b over pipeline={self.stages}: choose at most "
                f"data.micro_batch={share // self.stages or 1}, or parallel.schedule=gpipe"
            )

    def padded(self, share: int) -> int:
        """A share of the batch, filled up to whole micro-batches."""
        return math.ceil(share / self._micro_batch) * self._micro_batch

    @property
    def is_last(self) -> bool:
        """Whether this rank has the model's outputs."""
        return self.stage == self.stages - 1

    def cut(self, model: nn.Module, example: torch.Tensor) -> nn.Module:
        """This rank's layers under their own names, the work of the stages as equal as it can be.

        Args:
            example: one sample, to count the floating-point operations of each layer.

        Raises:
            ConfigError: the model is no sequence of layers, or has fewer with weights than stages.
        """
        if not isinstance(model, nn.Sequential):
            raise ConfigError(
                f"a pipeline needs a model that is an nn.Sequential, not a {type(model).__name__}"
            )
        layers = _with_weights(model)
        if len(layers) < self.stages:
            raise ConfigError(
                f"pipeline={self.stages} is more stages than the model has layers with weights: "
                f"choose at most pipeline={len(layers)}"
            )
        # A stage that ends in a view makes FSDP2 warn of writes in place (torch 2.15); it is sent.
        warnings.filterwarnings(
            "ignore", r"FSDP2-wrapped module \(FSDPSequential\) returned a view"
        )
        model.eval()
        operations, self._numbers = _costs(layers, example)
        model.train()
        self._bounds = balance(operations, self.stages)
        mine = layers[self._bounds[self.stage] : self._bounds[self.stage + 1]]
        return nn.Sequential(OrderedDict(layer for group in mine for layer in group))

    def describe(self, stage: nn.Module) -> str:
        """The layers of this rank, and what goes from stage to stage."""
        names = [name for name, _ in stage.named_children()]
        sent = " and ".join(str(self._numbers[bound - 1]) for bound in self._bounds[1:-1])
        return (
            f"Its layers are {names[0]} to {names[-1]}; between the stages {sent} numbers a sample "
            f"go forward and as many gradients back, {self._count} micro-batches a step "
            f"({self._schedule})."
        )

    def forward_backward(
        self,
        module: nn.Module,
        micro_batches: Sequence[Batch],
        loss: Callable[[torch.Tensor, Batch], torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Run a step.

        Args:
            loss: of outputs and their samples; called on the last stage.
            scale: of the losses whose gradient is left.

        Returns:
            The sum of the losses, not scaled; zero but on the last stage.
        """
        batch = Batch(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
        self._loss = lambda outputs, rows: (
            loss(outputs, Batch(*(part[rows] for part in batch))) * scale
        )
        device = batch.weights.device
        if self._run is None:
            stage = PipelineStage(module, self.stage, self.stages, device, group=self.group)
            self._run = SCHEDULES[self._schedule](
                stage,
                self._count,
                loss_fn=lambda outputs, rows: self._loss(outputs, rows),
                scale_grads=False,
            )
        inputs = (batch.inputs,) if self.stage == 0 else ()
        # The schedule cuts one target: rows, by which the loss finds targets and weights.
        rows = torch.arange(len(batch.weights), device=device) if self.is_last else None
        losses: list[torch.Tensor] = []
        self._run.step(*inputs, target=rows, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros((), device=device)).detach() / scale

    def forward(self, module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs, on every stage.

        One stage after the other sends to all: a schedule wants every batch as large as the first.
        """
        x = inputs
        for stage in range(self.stages):
            if stage == self.stage:
                x = module(x).float()
            x = self._broadcast(x, stage)
        return x

    def _broadcast(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        shape = torch.zeros(8, dtype=torch.int64, device=x.device)
        shape[: x.ndim] = torch.tensor(x.shape)
        dist.broadcast(shape, group=self.group, group_src=stage)
        if stage != self.stage:
            x = torch.empty([size for size in shape.tolist() if size], device=x.device)
        x = x.contiguous()
        dist.broadcast(x, group=self.group, group_src=stage)
        return x


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Bounds of consecutive parts whose largest cost is as small as it can be."""

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (len(costs),)
        return min(
            (max(sum(costs[start:cut]), best(cut, left - 1)[0]), (cut, *best(cut, left - 1)[1]))
            for cut in range(start + 1, len(costs) - left + 2)
        )

    return [0, *best(0, stages)[1]]


def _with_weights(model: nn.Sequential) -> list[list[tuple[str, nn.Module]]]:
    """The layers in groups that have weights: those without go with the one before them."""
    groups: list[list[tuple[str, nn.Module]]] = [[]]
    has_weights = False
    for name, layer in model.named_children():
        weighs = any(True for _ in layer.parameters())
        if weighs and has_weights:
            groups.append([])
        has_weights = has_weights or weighs
        groups[-1].append((name, layer))
    return groups


@torch.no_grad()
def _costs(
    layers: list[list[tuple[str, nn.Module]]], x: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Floating-point operations of each group of layers for a sample, and numbers it puts out."""
    operations, numbers = [], []
    for group in layers:
        with FlopCounterMode(display=False) as counter:
            for _, layer in group:
                x = layer(x)
        operations.append(counter.get_total_flops())
        numbers.append(x.numel())
    return operations, numbers
