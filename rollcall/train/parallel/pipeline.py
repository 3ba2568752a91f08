"""Pipeline parallelism: ranks hold stages of layers, and micro-batches run from stage to stage.

GPipe, https://arxiv.org/abs/1811.06965; 1F1B, https://arxiv.org/abs/1806.03377; interleaved 1F1B,
https://arxiv.org/abs/2104.04473; breadth-first, https://arxiv.org/abs/2211.05953; zero-bubble and
ZBV, https://arxiv.org/abs/2401.10241; DualPipe, https://arxiv.org/abs/2412.19437.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from rollcall.config import Config
from rollcall.config.checks import LOOPED, SPLIT_BACKWARD, V_SHAPED
from rollcall.config.schema import ConfigError, Parallel
from rollcall.train.data.source import Batch
from rollcall.train.parallel.head import Head
from rollcall.train.parallel.layers import balance, groups_of, span
from rollcall.train.ranks.device import whole_of
from rollcall.train.ranks.meeting import Meeting
from rollcall.train.ranks.world import World
from rollcall.train.torch_private import is_view, overrides
from rollcall.train.weights.deferred import tensors_of

SCHEDULES: dict[str, type[Any]] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "sequential": pipelining.ScheduleGPipe,  # with a single micro-batch, many times
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "breadth-first": pipelining.ScheduleLoopedBFS,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}

FORMATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
"""The formats of tensors that stages hand on."""
MOST_DIMENSIONS = 7
TAKES_GRADIENTS = torch.__version__ >= "2.14"
"""From 2.14 on, torch computes the gradient of a stage's input by `torch.autograd.grad`."""


def _problem(name: str, count: int, ranks: int, stages: int) -> str:
    """Return why a schedule cannot run this number of micro-batches; empty if it can."""
    if name in ("1f1b", "dualpipev") and count < stages:
        return f"it needs at least {stages}"
    rounds = max(1, count // ranks)
    if name in ("interleaved", "zero-bubble") and count % rounds:
        return f"in rounds of {ranks} or more it needs a multiple of {rounds}"
    return ""


def owners(schedule: str, ranks: int, per_rank: int) -> list[int]:
    """Return the rank of each stage."""
    forth = list(range(ranks))
    loops = [forth[:: -1 if schedule in V_SHAPED and loop % 2 else 1] for loop in range(per_rank)]
    return [rank for loop in loops for rank in loop]


def check_shared(name: str, stage: nn.Module) -> None:
    """Raise ConfigError for layers with one weight: torch computes its gradient twice (2.15)."""
    for places, weight in tensors_of(stage):
        if name in SPLIT_BACKWARD and weight.requires_grad and len(places) > 1:
            raise ConfigError(
                f"parallel.schedule={name}: {places[0]} and {places[1]} share a weight, which this "
                "schedule does not support; choose parallel.schedule=interleaved"
            )


def micro_batch(options: Parallel, asked: int | None, share: int, ranks: int, stages: int) -> int:
    """Return the samples of a micro-batch, as `asked` or the most that can run; or ConfigError."""
    name = options.schedule_name

    def problem(size: int) -> str:
        return _problem(name, math.ceil(share / size), ranks, stages)

    fitting = [size for size in range(1, share + 1) if not problem(size)]
    if asked is None:
        most = math.ceil(share / (1 if name == "sequential" else ranks))
        asked = max((size for size in fitting if size <= most), default=most)
    if asked in fitting or not problem(asked):
        return asked
    nearest = min(fitting, key=lambda size: (abs(size - asked), size), default=None)
    raise ConfigError(
        f"data.micro_batch={asked} makes {math.ceil(share / asked)} micro-batches of {share} "
        f"samples, which parallel.schedule={name} cannot run over {stages} stages on {ranks} "
        f"ranks: {problem(asked)}; choose "
        + (f"data.micro_batch={nearest}, or " if nearest else "")
        + "parallel.schedule=gpipe"
    )


class Pipeline:
    """The stages of a model, and how a step runs through them."""

    suspicion = "a forward method that does more than pipeline_layers() one after the other"

    def __init__(self, mesh: DeviceMesh, config: Config, world: World, share: int) -> None:
        """Divide `share` samples of a step into equal micro-batches; or raise ConfigError."""
        self.group = mesh.get_group()  # the ranks of one pipeline
        self._options, self._world, self._ranks = config.parallel, world, mesh.size()
        self._name = config.parallel.schedule_name
        self._is_looped = self._name in LOOPED
        self._per_rank = config.parallel.stages_per_rank if self._is_looped else 1
        self._owners = owners(self._name, self._ranks, self._per_rank)
        self.stages = len(self._owners)  # of the whole model
        own = mesh.get_local_rank()
        self.mine = [stage for stage, rank in enumerate(self._owners) if rank == own]
        size = config.data.micro_batch
        asked = None if size == "auto" else size  # `auto` is refused
        self._micro_batch = micro_batch(config.parallel, asked, share, self._ranks, self.stages)
        self._count = math.ceil(share / self._micro_batch)
        self._run: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._stages: list[_Accumulating] = []
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        self.losses = 0  # how many the newest step computed on this rank
        self.passes = 0  # of each layer in the newest step

    @property
    def at_once(self) -> int:
        """The number of micro-batches that run through the stages together."""
        return 1 if self._name == "sequential" else self._count

    def forget_shapes(self) -> None:
        """Let the next step have micro-batches of another size."""
        self._run = None

    def padded(self, share: int) -> int:
        """Return the size of a share of the batch, padded to whole micro-batches."""
        return math.ceil(share / self._micro_batch) * self._micro_batch

    def cut(self, model: nn.Module, example: torch.Tensor) -> list[nn.Module]:
        """Keep this rank's stages, balanced by cost, and return them; or raise ConfigError."""
        check_shared(self._name, model)
        groups = groups_of(model, example, self._world, self._options.balance)
        if len(groups) < self.stages:
            loops = f" with {self._per_rank} stages on each rank" if self._per_rank > 1 else ""
            most = len(groups) // self._per_rank
            nearest = f"pipeline={most}" if most else "parallel.schedule=1f1b"
            raise ConfigError(
                f"pipeline={self._ranks}{loops} makes {self.stages} stages, but the model has only "
                f"{len(groups)} layers with weights; choose at most {nearest}"
            )
        bounds = balance([group.cost for group in groups], self.stages)
        self._names: list[str] = []
        found: list[nn.Module] = []
        for stage in range(self.stages):
            held = groups[bounds[stage] : bounds[stage + 1]]
            layers = {name: layer for group in held for name, layer in group.layers.items()}
            if stage in self.mine:
                self._names.append(span(list(layers)))
                found.append(Stage(*layers.values()))
                _ignore_shape_inference(found[-1])
            else:  # the others keep their names
                for name in layers:
                    model.set_submodule(name, nn.Identity())
        return found

    def describe(self) -> str:
        """Name the layers of this rank."""
        return f" of layers {' and '.join(self._names)}"

    def forward_backward(
        self,
        modules: Sequence[nn.Module],
        micro_batches: Sequence[Batch],
        loss: Callable[[torch.Tensor, Batch], torch.Tensor],
        scale: float,
        head: Head,
    ) -> torch.Tensor:
        """Run the passes of a step; return the sum of the losses on the last rank, 0 elsewhere."""
        is_sequential = self._name == "sequential"
        runs = [*micro_batches] if is_sequential else [Batch.joined(micro_batches)]
        device = runs[0].weights.device
        if self._run is None:
            self._run = self._scheduled(modules, device)
        total, self.losses = torch.zeros((), device=device), 0
        self.passes = len(runs) * self.at_once
        for number, batch in enumerate(runs, 1):
            pieces = batch.split(len(batch.weights) // self.at_once)
            head.batch = pieces[0]  # torch infers shapes from it
            for stage in self._stages:
                stage.sends, stage.head, stage.batches = number == len(runs), head, pieces
            self._loss = lambda outputs, rows, batch=batch: (  # type: ignore[misc]
                loss(head.scored(outputs), batch.map(lambda part: part[rows])) * scale
            )
            # torch 2.11 needs the strides from which it inferred the shapes.
            inputs = (batch.inputs.contiguous(),) if 0 in self.mine else ()
            # The schedule splits one target tensor: row numbers, for the targets and weights.
            is_last = self.stages - 1 in self.mine
            rows = torch.arange(len(batch.weights), device=device) if is_last else None
            losses: list[torch.Tensor] = []
            self._run.step(*inputs, target=rows, losses=losses, return_outputs=False)
            self.losses += len(losses)
            total += sum(losses, torch.zeros((), device=device)).detach() / scale
        return total

    def _scheduled(
        self, modules: Sequence[nn.Module], device: torch.device
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        self._stages = [
            _Accumulating(module, stage, self.stages, device, group=self.group)
            for stage, module in zip(self.mine, modules, strict=True)
        ]
        stages = self._stages if self._is_looped else self._stages[0]
        options = {"loss_fn": lambda *given: self._loss(*given), "scale_grads": False}
        return SCHEDULES[self._name](stages, self.at_once, **options)  # type: ignore[no-any-return]

    def forward(self, modules: Sequence[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, on every rank. Stages of any batch size run one after the other."""
        x, mine = inputs, dict(zip(self.mine, modules, strict=True))
        for stage in range(self.stages):
            if stage in mine:
                x = whole_of(mine[stage](x)).float().contiguous()
            x = self._handed_on(x, stage)
        return x

    def pass_in_turn(
        self, modules: Sequence[nn.Module], inputs: torch.Tensor, meeting: Meeting
    ) -> None:
        """Let each stage in turn compute its output and the gradient of its input, as an attempt.

        So a stage that fails does so while the others wait for it in the meeting.
        """
        x, mine = inputs, dict(zip(self.mine, modules, strict=True))
        for stage in range(self.stages):
            with meeting.attempt(), meeting:
                if stage in mine:
                    x = x.detach().requires_grad_(stage > 0)
                    y = whole_of(mine[stage](x))
                    if x.requires_grad and y.requires_grad and TAKES_GRADIENTS:
                        torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
                    x = y.detach().contiguous()
                    if x.dtype not in FORMATS or x.ndim > MOST_DIMENSIONS:
                        raise ConfigError(
                            "stages of a pipeline hand on floating-point numbers in at most "
                            f"{MOST_DIMENSIONS} dimensions, but stage {stage} returns {x.dtype} in "
                            f"{x.ndim}"
                        )
            x = self._handed_on(x, stage)

    def _handed_on(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        """Return the output of a stage on the rank of the next one, of the last one on all."""
        owner, is_mine = self._owners[stage], stage in self.mine
        if stage + 1 == self.stages:
            return self._passed(x, is_mine, partial(dist.broadcast, group_src=owner))
        if is_mine and stage + 1 not in self.mine:
            return self._passed(x, True, partial(dist.send, group_dst=self._owners[stage + 1]))
        if stage + 1 in self.mine and not is_mine:
            return self._passed(x, False, partial(dist.recv, group_src=owner))
        return x

    def _passed(
        self, x: torch.Tensor, is_mine: bool, communicate: Callable[..., object]
    ) -> torch.Tensor:
        """Return a tensor that this rank has, or gets, by calls of a function for its parts."""
        facts = torch.zeros(1 + MOST_DIMENSIONS, dtype=torch.int64, device=x.device)
        if is_mine:
            facts[: x.ndim + 1] = torch.tensor([FORMATS.index(x.dtype), *x.shape])
        communicate(facts, group=self.group)
        if not is_mine:
            number, *shape = facts.tolist()
            sizes = [size for size in shape if size]
            x = torch.empty(sizes, dtype=FORMATS[number], device=x.device)
        communicate(x, group=self.group)
        return x


class Stage(nn.Sequential):
    """Layers one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last output, contiguous and not a view: it is detached in place and sent."""
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        for layer in self:
            x = layer(x)
        is_sent = x.is_contiguous() and not is_view(x)
        return x if is_sent else x.clone(memory_format=torch.contiguous_format)


class _Accumulating(overrides.Stage):
    """Adds up the gradients of several runs of a schedule, and sends them in the last one."""

    sends = True
    head: Head
    batches: Sequence[Batch]

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **options: Any) -> Any:
        """Pass a micro-batch through the stage."""
        self.head.batch = self.batches[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, *given, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients, unless a run follows."""
        if self.sends:
            super().perform_reduce_grad(grad_scale_factor)


def _ignore_shape_inference(module: nn.Module) -> None:
    """Keep BatchNorm's statistics when torch 2.11 runs a stage on zeros to infer its shapes."""
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
