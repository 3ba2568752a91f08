"""One optimizer step: forward and backward of every micro-batch, clip, update.

An update whose gradient is not finite changes nothing. The norm of the gradient is the same on
every rank and tells so on the device: no rank waits for another, or for its GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from train import optim
from train.config import Config
from train.data.order import Order
from train.data.source import Batch
from train.ema import Ema, gather_anew
from train.faults import alike, memory
from train.faults.spikes import Spikes
from train.losses import Objective
from train.parallel import Strategy
from train.parallel.shard import local_optimizer
from train.randomness import set_seed
from train.run import RunDir
from train.world import World


class Updated(NamedTuple):
    """What a step leaves to report, on the rank's device.

    Attributes:
        loss: the sum of this rank's weighted losses.
        grad_norm: of the whole gradient before it was clipped.
        skipped: whether the weights stay as they were; the same on every rank.
        fingerprint: of a piece of this rank's weights after the step.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    fingerprint: torch.Tensor


class Update:
    """Changes the weights by one batch at a time, and holds all that such changes leave behind.

    Attributes:
        micro_batch: samples of a rank that are computed at once; None for all of them.
        exhausted: whether this rank had no memory left for the newest gradient.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        run_dir: RunDir,
        order: Order,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
    ) -> None:
        self._config = config
        self._world = world
        self._run_dir = run_dir
        self._order = order
        self._strategy = strategy
        self._optimizer = optimizer
        self._objective = objective
        self._buffers = _Buffers(strategy.model)
        self._ema = Ema(strategy.model, config.optim.ema) if config.optim.ema else None
        self._spikes = Spikes(config.faults.spike, world.device) if config.faults.spike else None
        self._loss: torch.Tensor | None = None
        self.micro_batch = config.data.micro_batch
        self.exhausted = False

    def __call__(self, batch: Batch, step: int) -> Updated:
        """Do the update number `step` (from 0) with this rank's rows of its batch."""
        self.gradient(batch, step)
        return self.apply(batch, step)

    def gradient(self, batch: Batch, step: int) -> None:
        """Begin an update: leave its gradient, as `apply` needs it.

        Where a rank has no memory left the gradient becomes NaN on all of them, so none applies it.

        Raises:
            MemoryError: that happened where the strategy cannot tell the other ranks.
        """
        set_seed(self._config.seed, "step", self._strategy.stream, step)
        self._buffers.keep()
        micro_batches = list(self._cut(batch))
        self.exhausted, problem = False, ""
        try:
            self._loss = self._strategy.forward_backward(micro_batches, self._order.count(step))
        except (MemoryError, RuntimeError) as error:
            if not memory.is_exhausted(error):
                raise
            memory.snapshot(self._run_dir, step + 1, self._world.rank)
            problem = str(error) or type(error).__name__
        if problem:  # only here has the exception let go of the activations
            self._rejoin(problem, len(batch.weights))

    def split(self, rows: int) -> int:
        """Compute half as many samples at once, for the last step again and from now on.

        Args:
            rows: of this rank.

        Returns:
            How many.

        Raises:
            MemoryError: it was one sample.
        """
        if (self.micro_batch or rows) == 1:
            raise MemoryError(
                "memory ran out with a single sample: choose a smaller model, "
                "model.activation_checkpointing=blocks, or parallel.strategy=zero3"
            )
        if self._objective.scaler:
            self._objective.scaler.undo()
        self.micro_batch = math.ceil((self.micro_batch or rows) / 2)
        return self.micro_batch

    def drop(self) -> None:
        """Take back what `gradient` did; `apply` will do it again."""
        self._loss = None
        self._optimizer.zero_grad()
        self._strategy.forget()
        self._buffers.restore(torch.ones((), dtype=torch.bool, device=self._world.device))

    def apply(self, batch: Batch, step: int) -> Updated:
        """End an update: change the weights, if the gradient is finite."""
        if self._loss is None:
            self.gradient(batch, step)
        loss, self._loss = self._loss, None
        assert loss is not None
        scaler = self._objective.scaler
        norm = self._strategy.clip(
            self._config.optim.clip_norm, divisor=scaler.scale if scaler else None
        )
        skipped = ~norm.isfinite().to(self._world.device)
        if self._spikes:
            skipped = skipped | self._spikes.found(loss, self._order.count(step), skipped)
        rate = optim.learning_rate(self._config, step, self._order.steps)
        optim.set_learning_rate(self._optimizer, rate)
        self._optimize(skipped)
        self._buffers.restore(skipped)
        if self._ema:
            self._ema.update(skipped)
        if scaler:
            scaler.update(skipped)
        self._optimizer.zero_grad()
        watched = self._config.faults.divergence != "off"
        _, numbers = alike.piece(self._strategy.model, step)
        fingerprint = alike.fingerprint(numbers) if watched else torch.zeros(())
        return Updated(loss, norm, skipped, fingerprint)

    def summary(self) -> dict[str, str]:
        """Rows for the summary of the run."""
        if self.micro_batch == self._config.data.micro_batch:
            return {}
        return {"memory": f"data.micro_batch={self.micro_batch} fits from the start"}

    def evaluated(self) -> AbstractContextManager[None]:
        """While it is open the model has the weights that are to be evaluated."""
        return (
            self._ema.in_place() if self._ema and self._config.optim.evaluate_ema else nullcontext()
        )

    def state(self) -> dict[str, Any]:
        """Everything that updates change, under global names, to save or to fill in place."""
        own = local_optimizer(self._optimizer)
        has_begun = bool(own.state)
        state = self._strategy.state(self._optimizer)
        if not has_begun:  # torch fills it by a step of its own, which it counts (2.11, 2.15)
            for values in own.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        if self._ema:
            state["ema"] = self._ema.state()
        if self._objective.scaler:
            state["scaler"] = self._objective.scaler.state()
        if self._spikes:
            state["spikes"] = self._spikes.state()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` returned and a checkpoint has filled."""
        self._strategy.load_state(self._optimizer, state)
        gather_anew(self._strategy.model)

    def _rejoin(self, problem: str, rows: int) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._strategy.rejoin():
            half = max(1, (self.micro_batch or rows) // 2)
            memory.propose(self._run_dir, half)
            raise MemoryError(
                f"rank {self._world.rank} on {self._world.host} had no memory left: {problem}. "
                f"The same command again goes on with data.micro_batch={half}"
            )
        self._loss = torch.full((), torch.nan, device=self._world.device)
        self.exhausted = True

    def _optimize(self, skipped: torch.Tensor) -> None:
        own: Any = local_optimizer(self._optimizer)
        if all(group.get("fused") for group in own.param_groups):
            own.found_inf = skipped.float()  # fused kernels read it on the device
            self._optimizer.step()
            own.found_inf = None
        elif not skipped:  # on a GPU this waits for it
            self._optimizer.step()

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        rows = len(batch.weights)
        size = self.micro_batch or rows
        for start in range(0, rows, size):
            part = Batch(*(tensor[start : start + size] for tensor in batch))
            yield part.to(self._world.device)


class _Buffers:
    """What forward passes change besides gradients, such as BatchNorm's running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [
            buffer
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Remember them as they are."""
        self._kept = [buffer.clone() for buffer in self._buffers]

    def restore(self, where: torch.Tensor) -> None:
        """Put back what `keep` remembered, if `where` is true."""
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(torch.where(where.to(buffer.device), kept, buffer))
