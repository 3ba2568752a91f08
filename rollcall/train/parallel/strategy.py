"""A model spread over a mesh by parts, and a training step over it."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from rollcall.config import Config, ConfigError
from rollcall.config.checks import SPLIT_BACKWARD
from rollcall.config.mesh import NODE, parse
from rollcall.messages.text import size
from rollcall.train import torch_private
from rollcall.train.data.source import Batch
from rollcall.train.numerics import optim
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.numerics.examination import examined
from rollcall.train.numerics.hidden import left_alone
from rollcall.train.numerics.losses import Objective, Scored, Sums, in_fp32, outputs_of
from rollcall.train.numerics.optim import OPTIONS
from rollcall.train.numerics.precision import autocast
from rollcall.train.numerics.randomness import kept
from rollcall.train.parallel.assembly import parts, weights_mesh
from rollcall.train.parallel.experts import Balance, Experts, Perceptrons, stacks_of
from rollcall.train.parallel.gathering import SharedBuffers, joined, of_all_ranks, twice
from rollcall.train.parallel.gradients import LossWeights, by_mesh, clip
from rollcall.train.parallel.head import Head, find
from rollcall.train.parallel.part import (
    Fill,
    MakeOptimizer,
    Part,
    UnusedWeights,
    evaluating,
    explain,
    flatten,
    one_input,
    unflatten,
)
from rollcall.train.parallel.pipeline import Pipeline
from rollcall.train.parallel.shard import Shard, local_optimizer, with_weights
from rollcall.train.parallel.tensor import Tensor
from rollcall.train.ranks.clock import BACKWARD, COMMUNICATION, FORWARD, OTHER, clock, watch
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.meeting import Meeting
from rollcall.train.ranks.world import World

LOSS = "train_loss"
"""The first part of the names of a loss's weights."""
ONE = {
    "replicate": "replica",
    "shard": "shard",
    "expert": "part of the experts",
    "context": "piece of the sequences",
    "tensor": "tensor part",
    "pipeline": "pipeline part",
}
MANY = {"expert": "parts of the experts", "context": "pieces of the sequences"}


class Strategy:
    """A model, the parts that spread it, and a training step over it."""

    def __init__(self, config: Config, world: World, loss: Objective) -> None:
        """Create the mesh; raise ConfigError if it does not fit the world size or the batch."""
        self.world, self._objective, self.loss = world, loss, loss.loss
        self.degrees = config.parallel.degrees(world.world_size, _node_size(config, world))
        # Ranks of one replica compute the same samples: its stages, the parts of its layers, the
        # pieces of its sequences. Neighboring ranks differ in the tensor part, then in the piece.
        self.copies = copies = self.degrees.get("tensor", 1)
        pieces, stages = self.degrees.get("context", 1), self.degrees.get("pipeline", 1)
        self.data_ranks = world.world_size // copies // pieces // stages  # shares of every batch
        # Each stage has its own stream of random numbers, the same on ranks that compute the same
        # activations; ranks with pieces of activations fork theirs.
        self.stream, place = divmod(world.rank, pieces * copies)
        self.data_rank = self.stream % self.data_ranks  # the number of this rank's share
        # Replicas that take steps alone (see outer.py), and the ranks that take them with this one.
        is_apart = config.parallel.sync != "step"
        self.apart = self.degrees["replicate"] if is_apart else 1
        self.counts = 1 / self.apart if world.rank * self.apart % world.world_size == 0 else 0.0
        if self.data_ranks > config.data.global_batch:
            raise ConfigError(
                f"data.global_batch={config.data.global_batch}: expected at least "
                f"{self.data_ranks}, one sample for each share of the batch"
            )
        self._mesh = mesh = weights_mesh(self.degrees, world)
        self.replicas_apart = mesh["replicate"] if mesh and is_apart else None
        is_sharded = mesh is not None and is_apart and "shard" in (mesh.mesh_dim_names or ())
        self.group = mesh["shard"].get_group() if mesh and is_sharded else None
        self._pipeline: Pipeline | None = None
        if mesh and stages > 1:
            share = math.ceil(config.data.global_batch / self.data_ranks)
            self._pipeline = Pipeline(mesh["pipeline"], config, world, share)
        self._parts = parts(config, world, self.degrees, mesh, loss.loss)
        # Likely causes if the spread model computes something else than the plain one.
        self.suspicions = [part.suspicion for part in self._parts if part.changes_passes]
        self.suspicions += [Pipeline.suspicion] if self._pipeline else []
        self.changes_passes = bool(self.suspicions)
        self.gathers = any(part.shards for part in self._parts)  # weights, on all ranks together
        self.rounds = any(part.rounds for part in self._parts)  # to 16 bits, even in fp32
        self._sharing = [part for part in self._parts if type(part).share is not Part.share]
        self._is_pipeline = "pipeline" in parse(config.parallel.mesh_text)
        # The part that gathers weights on all ranks together, if all of them hold all layers.
        self._shard = next((part for part in self._parts if isinstance(part, Shard)), None)
        self.sharding = None if self._is_pipeline else self._shard
        self._pads_to_longest = config.data.pad is True
        self._packs = bool(config.data.pack)
        self._averaged = self.data_ranks * pieces  # the parts average gradients over these ranks
        piece, copy = divmod(place, copies)
        self.counts_loss = copy == 0  # of copies of a loss, one counts in a sum
        # In how many pieces activations may be cut, each with the number of this rank's: of a
        # context group, of a tensor group, and of both.
        self.pieces = [(pieces, piece), (copies, copy), (pieces * copies, place)]
        # The ranks over which the optimizer sees shards of weights; None if it sees whole ones.
        names = ("shard", "tensor") if config.parallel.stage > 1 else ("tensor",)
        sharded = [name for name in names if self.degrees.get(name, 1) > 1]
        self.sharding_mesh = mesh[sharded[0]] if mesh and sharded else None
        self._autocast, self._optim = autocast(config.precision, world.device), config.optim
        self._gather = of_all_ranks if config.train.gather else None
        if config.model.sync_buffers and (config.exact or stages > 1):
            raise ConfigError("model.sync_buffers works neither in a pipeline nor with exact=true")
        if config.model.sync_buffers and world.world_size > 1:  # finishes before DDP may refuse
            self._parts.insert(0, SharedBuffers(config.model.sync_buffers, self._averaged))
        # Whether a last layer may compute the loss, with its gradient; fp16 needs the scale before.
        is_split = self._pipeline and config.parallel.schedule_name in SPLIT_BACKWARD
        is_moved = config.parallel.strategy == "dp" or any(part.places for part in self._parts)
        self._may_fuse = not (is_moved or is_split or config.train.gather or loss.scaler)
        is_cut = copies * pieces * stages > 1
        if self._gather and (config.exact or loss.loss.takes_model or is_cut):
            raise ConfigError(
                "train.gather=true expects a loss of (outputs, targets) and ranks that hold whole "
                "samples and layers: choose ddp or a zero strategy, without exact=true"
            )
        is_other = config.parallel.compression != "none" or config.parallel.strategy == "dp"
        if loss.loss.turns and (is_cut or is_other or config.exact or config.faults.spike_factor):
            raise ConfigError(
                f"train.loss={loss.loss.name} trains networks in turn: choose single, ddp or a "
                "zero strategy, without exact=true, parallel.compression and faults.spike_factor"
            )
        if is_apart and (loss.loss.turns or loss.loss.module):
            raise ConfigError(
                f"train.loss={loss.loss.name} has weights of its own or trains networks in turn, "
                f"which parallel.sync={config.parallel.sync} cannot: remove parallel.sync"
            )
        self._offloads = config.parallel.cpu_offload
        self._loss_module = loss.loss.module  # a loss with weights, which all ranks hold whole
        if self._loss_module:
            factor = float(self.counts_loss) / self._averaged
            self._parts.append(LossWeights([*self._loss_module.parameters()], factor))
            for tensor in self._loss_module.to(world.device).state_dict().values():
                dist.broadcast(tensor, 0)
        self.model: nn.Module  # what this rank holds, under the names of the plain model
        self.trained: nn.Module  # the model, and the weights of the loss if it has some
        self._passed: list[nn.Module]  # the model, or the stages of this rank
        self._callables: list[nn.Module]  # what the parts made of them
        # What happens in a wrapped model before its forward pass begins.
        self._before = COMMUNICATION if world.world_size > 1 else FORWARD

    @property
    def shares(self) -> tuple[range, int]:
        """This rank's shares of the samples in an evaluation, and the number of shares."""
        return range(self.data_rank, self.data_rank + 1), self.data_ranks

    def rows(self, batch: int) -> range:
        """Return this rank's rows of a batch: one number for all ranks, perhaps with padding."""
        share = math.ceil(batch / self.data_ranks)
        if self._pipeline:
            share = self._pipeline.padded(share)
        return range(self.data_rank * share, (self.data_rank + 1) * share)

    def place(self, model: nn.Module, example: Batch, fill: Fill | None = None) -> None:
        """Apply the parts to the model; without `fill`, one on the meta device stays there."""
        names = [name for name, _ in self._with_loss(model).named_parameters()]
        optim.check_groups(self._optim, names)
        for part in self._parts:
            part.check(model, example)
        if "context" in self.degrees and self.loss.shifts:
            raise ConfigError(
                f"train.loss={self.loss.name} predicts the first token of a piece from the "
                "piece before it, which is on another rank with context parallelism: let the data "
                "set return the next tokens as targets, for train.loss=cross_entropy"
            )
        experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
        self.penalizes = any(m.balance_loss or m.z_loss for m in experts.values())
        self._scale = 1.0  # of the losses of a step
        self._mean_weight: float | torch.Tensor = 1.0  # of the samples of the step, if it penalizes
        drops = any(m.capacity_factor for m in experts.values())
        if "context" in self.degrees and (self.penalizes or drops):
            raise ConfigError(
                "the losses and capacities of experts are about whole sequences, which context "
                "cuts: remove model.balance_loss, model.router_z_loss and model.expert_capacity, "
                "or choose another mesh"
            )
        if drops and (self._packs or self._pads_to_longest):
            raise ConfigError(
                "model.expert_capacity counts the tokens of a row, which data.pack and "
                "data.pad=true change with the other samples: remove one of them, or set data.pad "
                "to a number"
            )
        if experts and self.replicas_apart:
            raise ConfigError(
                "parallel.sync: the replicas balance the experts of this model in every step; "
                "remove the key"
            )
        self._whole = sum(parameter.nbytes for parameter in model.parameters())
        self.model, modules = model, [model]
        if self._is_pipeline:
            self._check_pipeline(example)
        self._head = find(model, example, self.loss) if self._may_fuse else Head("", 0, self.loss)
        for part in (part for part in self._parts if isinstance(part, Tensor)):
            part.keeps_logits = self._head.is_cut = self._head.classes > 0
        if self._pipeline:
            modules = self._pipeline.cut(model, example.inputs[:1])
        turns = dict.fromkeys(self.loss.turns)  # the loss calls these, and not the model
        self._passed = modules = [getattr(model, turn) for turn in turns] or modules
        is_empty = any(weight.is_meta for weight in model.parameters())
        places = any(part.places for part in self._parts)
        home = torch.device("cpu") if places else self.world.device

        def give_values() -> None:
            if not is_empty:
                model.to(home)
            elif fill:
                fill(model, torch.device("cpu") if self._offloads else home, home)
            else:
                return  # it stays on the meta device
            for part in self._parts:
                part.keep_piece(model)

        # Parts that move or replicate weights need their values; parts that shard them do not.
        before_parts = places or not is_empty
        if before_parts:
            give_values()
        for part in self._parts:
            part.apply(model)
        if not before_parts and not self.gathers:
            give_values()
        for part in self._parts:
            if fill or part.shards or not is_empty:
                modules = [part.wrap(module) for module in modules]
        if not before_parts and self.gathers:
            give_values()
        held = {*model.modules()}  # layers of other pipeline stages are not
        if experts:
            layers = {name: (m.number, m if m in held else None) for name, m in experts.items()}
            pipeline = self._pipeline
            passes = (lambda: pipeline.passes) if pipeline else (lambda: 0)  # 0: all of the step
            of_step = self.copies, passes, self._factor, drops
            self._parts.append(Balance(layers, *of_step, self.world.device))
        self._callables = [model] if turns else modules
        self.trained = self._with_loss(model)
        self._groups = by_mesh(self.trained.parameters())
        self.written: set[str] = set()  # what forward() has written to in the passes of `warm_up`

    def _factor(self) -> float | torch.Tensor:
        """Return the factor of a sample's penalty in the gradient, which weights divide later."""
        scale, scaler = self._scale * self._mean_weight, self._objective.scaler
        return scale * scaler.scale if scaler else scale

    def weigh(self, weight: torch.Tensor, samples: int) -> None:
        """Note the mean weight of the step's samples, given the sum of those of this rank's."""
        total = weight.to(self.world.device)
        dist.all_reduce(total, group=self.group)
        ranks = self.world.world_size // self.apart
        self._mean_weight = (total * self.data_ranks / ranks / samples).float()

    def _with_loss(self, model: nn.Module) -> nn.Module:
        module = self._loss_module
        return torch_private.with_child(model, LOSS, module) if module else model

    def _check_pipeline(self, example: Batch) -> None:
        """Raise ConfigError for what no pipeline can do, also on one rank, where there is none."""
        loss = self.loss
        if loss.takes_model:
            raise ConfigError(
                f"train.loss={loss.name} calls the model itself, but a pipeline calls its layers "
                "in turn: use a loss of (outputs, targets), or another strategy"
            )
        if self._loss_module:
            raise ConfigError(
                f"train.loss={loss.name} has weights, which only the last stage of a "
                "pipeline would train; choose another strategy"
            )
        one_input(example, "a pipeline")
        if self._pads_to_longest:
            raise ConfigError(
                "data.pad=true makes batches of unequal length, which a pipeline cannot run: set "
                "data.pad to the length of the longest row"
            )

    def watch(self, waits: bool) -> None:
        """Let the clock of phases know when passes begin; see `rollcall.train.ranks.clock`."""
        has_several = self._pipeline is not None or bool(self.loss.turns)
        watch(self._passed, has_several, waits)

    def warm_up(self, example: Batch) -> None:
        """Run the backward passes that parts need, so that the first step is like any other."""
        example = example.to(self.world.device)
        left = passes = max((part.warm_ups for part in self._parts), default=0)
        function = self.loss.function
        with examined(self.model, function, self.world.device, draws=True) as seen:
            while left:
                left, unused = left - 1, False
                try:
                    self.forward_backward([example], len(example.weights))
                except UnusedWeights:
                    unused = True
                except RuntimeError as error:
                    explain(error)
                    raise
                self.trained.zero_grad()
                if self.world.has_any(unused):
                    self.allow_unused()
                    left = passes
            self.written = seen.written()

    def example_pass(self, example: Batch) -> tuple[float]:
        """Leave the gradient of the mean loss of the samples of all ranks; return it in fp32."""
        micro_batches = [example] * (self._pipeline.at_once if self._pipeline else 1)
        count = len(example.weights) * len(micro_batches) * self.data_ranks
        with self._checking():
            total = self.forward_backward(micro_batches, count)
            sums = self._objective.sums_of_weights(total.device)
        all_sums = torch.cat([total.view(1), sums])
        dist.all_reduce(all_sums)
        return (float(self._per_weight(self.model, all_sums[0] / count, all_sums[1:])),)

    def pass_in_turn(self, example: Batch, meeting: Meeting) -> tuple[()]:
        """Pass samples through the stages of a pipeline one after the other, each as an attempt."""
        assert self._pipeline is not None
        with self._checking(), self._around(last=False):
            self._pipeline.pass_in_turn(self._callables, self._share(example).inputs, meeting)
        return ()

    def plain_pass(
        self, model: nn.Module, batch: Batch, backward: bool = False, beside: bool = False
    ) -> tuple[float, float, float, float]:
        """Return the loss of a model that is not cut, and the sums of losses and of their weights.

        Last comes how much the losses change `beside` others. A `backward` pass leaves the gradient
        of the loss.
        """
        takes_model, rows = self.loss.takes_model, len(batch.weights)
        with self._checking():
            with left_alone({"": self.loss.function}):  # it may count its calls
                if takes_model:
                    outputs, total = None, self._objective.of_model(model, batch)
                else:
                    outputs = outputs_of(model, batch)
                    total = self._sum_of_losses(outputs, batch)
                if backward:
                    (total / rows).backward()  # type: ignore[no-untyped-call]
            sums, change = self._objective.sums_of_weights(total.device), 0.0
            if beside and isinstance(outputs, torch.Tensor):
                change = self._change_beside_others(outputs, batch, total.item())
        loss = self._per_weight(model, total.detach() / rows, sums)
        return loss.item(), total.item(), float(sums[0]), change

    def _change_beside_others(self, outputs: torch.Tensor, batch: Batch, total: float) -> float:
        """Return the relative change of losses beside halved outputs, or the same if these fail."""
        for others in (outputs / 2 if outputs.is_floating_point() else outputs, outputs):
            sums = []
            with suppress(ValueError, ArithmeticError, AssertionError, IndexError, TypeError):
                for rows, samples in ((others, batch), joined(outputs, others, batch)):
                    with left_alone({"": self.loss.function}):
                        sums.append(self._sum_of_losses(rows, samples).item())
                change = abs(total + sums[0] - sums[1]) / ((abs(total) + abs(sums[0])) or 1.0)
                if math.isfinite(change):
                    return change
        return 0.0

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Compute in fp32, and leave nothing to later passes but gradients of the model."""
        before = self._autocast, self._gather
        self._autocast, self._gather = nullcontext, twice if self._gather else None
        self._objective.weights.clear()
        try:
            yield
        finally:
            self._autocast, self._gather = before
            self._objective.weights.clear()
            if self._loss_module:
                self._loss_module.zero_grad()
            if self._pipeline:
                self._pipeline.forget_shapes()

    def _per_weight(self, model: nn.Module, loss: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Divide a loss and the gradients by the mean weight, if the loss returns weights."""
        if not self.loss.is_weighted:
            return loss
        mean = float(sums[0] / sums[1])
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.div_(mean)
        return loss / mean

    def among_copies(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks of the tensor group: (copies, *values.shape)."""
        assert self._mesh is not None
        found = [torch.empty_like(values) for _ in range(self.copies)]
        dist.all_gather(found, values, group=self._mesh["tensor"].get_group())
        return torch.stack(found)

    def describe(self) -> str:
        """Describe the mesh and the weights on rank 0."""
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        product = " × ".join(
            f"{degree} {ONE[name] if degree == 1 else MANY.get(name, f'{ONE[name]}s')}"
            for name, degree in self.degrees.items()
        )
        held = sum(local_of(weight).nbytes for weight in self.model.parameters())
        return (
            f"{ranks}{' = ' * bool(product)}{product}; rank {self.world.rank} holds "
            f"{size(held)} of {size(self._whole)} of weights"
            f"{self._pipeline.describe() if self._pipeline else ''}."
        )

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Return the optimizer from `make`; fused updates need groups of one mesh each."""
        for part in self._parts:
            make = part.optimizer(make)
        names = {weight: name for name, weight in self.trained.named_parameters()}
        groups = [(group, names) for group in self._groups]
        modules = [*stacks_of(self.model).values()]
        modules += [m for m in self.model.modules() if isinstance(m, Perceptrons)]  # shared ones
        stacks = {weight for module in modules for weight in module.parameters()}
        divided = (optim.groups(self._optim, *group, stacks) for group in groups)
        return make([part for parts in divided for part in parts])

    def forward_backward(self, micro_batches: Sequence[Batch], count: float) -> torch.Tensor:
        """Leave on every rank the gradient of the mean loss over all `count` samples of the step.

        The scalar returned, summed over all ranks, is the sum of the weighted losses. Dividing by
        the count of the whole step makes the result independent of how the batch is divided. Parts
        average over the data ranks; the scale compensates for that. Raise UnusedWeights if the
        gradient is NaN on every rank, and `allow_unused` is needed.
        """
        clock.enter(self._before)
        scale = self._scale = self._averaged / count
        if self._sharing:
            micro_batches = [self._share(batch) for batch in micro_batches]
        if self._pipeline:
            total = self._through_stages(self._pipeline, micro_batches, scale)
        elif self._gather and len(micro_batches) > 1:
            total = self._of_cached_outputs(micro_batches, scale)
        else:
            losses, last = [], len(micro_batches) - 1
            for number, batch in enumerate(micro_batches):
                with self._around(last=number == last):
                    loss = self._loss_of(self._callables[0], batch)
                    clock.enter(BACKWARD)
                    loss.backward(torch.full_like(loss, scale))  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            total = losses[0] if last == 0 else torch.stack(losses).sum()
        unused = [part.finish(self.model) for part in self._parts]
        if any(unused):
            raise UnusedWeights
        clock.enter(OTHER)
        return total if self.counts_loss else torch.zeros_like(total)

    def _through_stages(
        self, pipeline: Pipeline, micro_batches: Sequence[Batch], scale: float
    ) -> torch.Tensor:
        fits = self._head.fits(micro_batches[0])
        scoring = self._head.scoring(self.model, micro_batches[0]) if fits else nullcontext()
        with self._around(last=True), self._autocast(), scoring:
            given = self._callables, micro_batches, self._sum_of_losses, scale, self._head
            total = pipeline.forward_backward(*given)
        # torch calls the loss once more in the first step, to infer shapes (2.15).
        del self._objective.weights[: -pipeline.losses]
        return total

    def _of_cached_outputs(self, micro_batches: Sequence[Batch], scale: float) -> torch.Tensor:
        """Pass all micro-batches without a graph, then again with the gradients of their outputs.

        So the loss sees all outputs at once, but memory holds the activations of one micro-batch.
        GradCache, https://arxiv.org/abs/2101.06983.
        """

        def outputs(batch: Batch) -> torch.Tensor:
            with self._autocast():
                result = outputs_of(self._callables[0], batch)
            if not isinstance(result, torch.Tensor):
                raise ConfigError(
                    "train.gather=true with several micro-batches expects one tensor from the "
                    f"model, got a {type(result).__name__}: remove data.micro_batch"
                )
            return result

        with torch.no_grad(), left_alone({"": self.model}), kept(self.world.device):
            parts = [outputs(batch) for batch in micro_batches]
        leaf = torch.cat(parts).requires_grad_()
        loss = self._sum_of_losses(leaf, Batch.joined(micro_batches))
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        gradients = torch.split(leaf.grad, [len(part) for part in parts])
        for number, (batch, gradient) in enumerate(zip(micro_batches, gradients, strict=True), 1):
            with self._around(last=number == len(parts)):
                outputs(batch).backward(gradient)  # type: ignore[no-untyped-call]
        return loss.detach()

    def _share(self, batch: Batch) -> Batch:
        for part in self._sharing:
            batch = part.share(batch)
        return batch

    def _around(self, last: bool) -> AbstractContextManager[Any]:
        contexts = [part.around(last) for part in self._parts]
        if len(contexts) < 2:  # a stack takes longer
            return contexts[0] if contexts else nullcontext()
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack

    def _loss_of(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with self._autocast():
            if self.loss.takes_model:
                return self._objective.of_model(model, batch)
            if self._head.classes and self._head.fits(batch):
                with self._head.scoring(self.model, batch):
                    outputs = self._head.scored(outputs_of(model, batch))
            else:
                outputs = outputs_of(model, batch)
        return self._sum_of_losses(outputs, batch)

    def _sum_of_losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        if self._gather:
            outputs, batch = self._gather(outputs, batch)
        outputs = outputs if self.loss.converts else in_fp32(outputs)
        return self._objective(outputs, batch.targets, batch.weights)

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the model in evaluation mode: (rows, …, classes), fp32."""
        outputs = self._evaluated(batch, outputs_of)
        for part in self._parts:
            outputs = part.gather(outputs)
        return in_fp32(outputs)

    def sums(self, batch: Batch) -> Sums:
        """Return what a loss that calls the model itself adds up to, in evaluation mode."""
        return self._evaluated(batch, self.loss.of_model)  # type: ignore[no-any-return]

    @torch.no_grad()
    def samples(self, draw: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        """Return the images that a function draws with the model in evaluation mode."""
        with evaluating(self.model), self._around(last=True):
            return draw(self._callables[0])

    def scores(self, batch: Batch) -> tuple[Scored, torch.Tensor] | None:
        """Return losses and hits of targets (rows, …) if the last layer can compute them."""
        if not self._head.fits(share := self._share(batch)):
            return None
        with self._head.scoring(self.model, share):
            outputs = self._evaluated(batch, outputs_of)
        for part in self._parts:
            outputs = part.gather(outputs)
        losses, hits = outputs[..., 0], outputs[..., 1]  # copies of other tensor ranks follow
        return Scored(losses, losses.sum()), hits

    @torch.no_grad()
    def _evaluated(self, batch: Batch, call: Callable[[nn.Module, Batch], Any]) -> Any:
        batch = self._share(batch)
        with evaluating(self.model), self._around(last=True), self._autocast():
            if self._pipeline:
                return self._pipeline.forward(self._callables, batch.inputs)
            return call(self._callables[0], batch)

    def clip(self, max_norm: float | None, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Divide the gradient, then clip it to a norm, if any; return the norm before clipping."""
        group = self._pipeline.group if self._pipeline else None
        norm = clip(self._groups, max_norm, group, divisor)
        if self._shard and self._shard.zeros:
            self._shard.drop_unused()
        return norm

    def finish_with_nan(self) -> bool:
        """Complete a failed pass with NaN on all ranks; return whether that worked."""
        if self._pipeline or self.apart > 1:  # the other replicas have taken the step
            return False
        if not all(part.finish_with_nan(self.model) for part in self._parts):
            return False
        weight = next(weight for weight in self.model.parameters() if weight.requires_grad)
        weight.grad = torch.full_like(weight, torch.nan)
        return True

    def allow_unused(self) -> None:
        """Let later steps leave weights out of the loss; every rank calls it together."""
        for part in self._parts:
            self._callables = [part.allow_unused(module) for module in self._callables]

    def forget(self) -> None:
        """Drop what a gradient that is not finite would carry over to the next step."""
        for part in self._parts:
            part.forget()

    def replicas(self, alike: Collection[str]) -> list[list[int]]:
        """Return all ranks, in groups that differ only in these dimensions of the weights."""
        if self._mesh is None:
            return []
        names, grid = self._mesh.mesh_dim_names or (), self._mesh.mesh
        order = sorted(range(len(names)), key=lambda place: names[place] in alike)
        size = math.prod(grid.shape[place] for place in order if names[place] in alike)
        groups: list[list[int]] = grid.permute(order).reshape(-1, size).tolist()
        return groups

    def alike(self, tensor: torch.Tensor, is_buffer: bool) -> frozenset[str]:
        """Return the dimensions over whose ranks this weight or buffer is the same."""
        names = frozenset((self._mesh and self._mesh.mesh_dim_names) or ()) - {"pipeline"}
        names -= {"replicate"} if self.replicas_apart else set()
        if is_buffer:
            return names & {"tensor"}
        if isinstance(tensor, DTensor):
            cut = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
            names -= {name for name, placement in cut if not placement.is_replicate()}
            if "expert" in (tensor.device_mesh.mesh_dim_names or ()):  # part of one of the others
                names -= {"shard" if "shard" in self.degrees else "replicate"}
        return names

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum small tensors over all shares, each once; return the sum on all ranks."""
        total = torch.stack(list(terms)).sum(0)
        dist.all_reduce(total)  # the ranks of a replica contribute the same values
        return total * self.data_ranks / self.world.world_size

    def share(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give buffers that each replica has computed of its own samples the first one's values."""
        mesh = self._mesh
        names = {"replicate", "shard"} & {*((mesh and mesh.mesh_dim_names) or ())}
        if not mesh or not names:
            return
        vectors = flatten(buffers)  # one message for all of a type
        for name in sorted(names):
            for vector in vectors:
                dist.broadcast(vector, group=mesh.get_group(name), group_src=0)
        for buffer, value in zip(buffers, unflatten(vectors, buffers), strict=True):
            buffer.copy_(value)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return model and optimizer under global names, to be saved or filled in place."""
        if self._loss_module:
            drop_gathered(self.model)  # as its own hooks do otherwise
        held = with_weights(local_optimizer(optimizer))
        named, optim = state_dict.get_state_dict(self.trained, held, options=OPTIONS)
        if not self._loss_module:
            return {"model": named, "optim": optim}
        parts: dict[str, Any] = {"model": {}, "optim": optim, "loss": {}}
        for name, tensor in named.items():
            rest = name.removeprefix(f"{LOSS}.")
            parts["model" if rest == name else "loss"][rest] = tensor
        return parts

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state that a checkpoint has filled; the optimizer keeps this run's options."""
        own = local_optimizer(optimizer)
        named = {f"{LOSS}.{name}": tensor for name, tensor in state.get("loss", {}).items()}
        named |= state["model"]
        if self._loss_module:
            drop_gathered(self.model)
        given: Any = {"model_state_dict": named, "optim_state_dict": state["optim"]}
        with optim.own_options(self._optim, own):
            state_dict.set_state_dict(self.trained, with_weights(own), **given, options=OPTIONS)


def _node_size(config: Config, world: World) -> int:
    """Return the ranks per node; if the mesh uses it, all nodes must have the same number."""
    mine = world.place.local_world_size
    if NODE not in config.parallel.mesh_text:
        return mine
    first = world.broadcast(mine)
    problem = (
        f"the mesh {config.parallel.mesh_text} needs the same number of ranks on every node, "
        f"but rank {world.rank} is on a node of {mine} ranks and rank 0 on one of {first}"
    )
    world.raise_together(problem if mine != first else "")
    return mine
