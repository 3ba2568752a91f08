"""The step: forward, backward, update, log, checkpoint, stop.

Nothing here asks which strategy trains. One small collective per step carries what all ranks must
know of it: the loss, the count and the wish to stop. Its result is read one step later, so neither
the network nor the GPU is waited for, and all ranks act on it after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from train import optim
from train.checkpoint import Checkpointer
from train.config import Config
from train.data.order import Order, training_batches, validation_batches
from train.data.source import Batch, Source
from train.metrics import Metrics, StepResult
from train.parallel import Strategy
from train.randomness import set_seed
from train.run import RunDir, State
from train.stop import Agreement, StopSignals
from train.world import World


def per_sample_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each sample: (rows, …, classes) and (rows, …) to (rows,)."""
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and share of correct answers over the whole validation set."""

    loss: float
    accuracy: float


class Trainer:
    """A run in one process: everything that the steps need, and the steps."""

    def __init__(
        self,
        config: Config,
        world: World,
        run_dir: RunDir,
        source: Source,
        order: Order,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        stop: StopSignals,
    ) -> None:
        self.config = config
        self.world = world
        self.run_dir = run_dir
        self.source = source
        self.order = order
        self.strategy = strategy
        self.optimizer = optimizer
        self.stop = stop
        self.checkpoints = Checkpointer(run_dir.checkpoints, world, config.checkpoint.keep)
        self.metrics: Metrics | None = None
        self.step = 0
        self.saved_at: int | None = None
        self.result: Evaluation | None = None

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        self.checkpoints.clean()
        self.saved_at = self.checkpoints.newest()
        if self.saved_at is not None:
            state = self.strategy.state(self.optimizer)
            self.checkpoints.load(self.saved_at, state)
            self.strategy.load_state(self.optimizer, state)
            self.step = self.saved_at
            self._record("resumed", step=self.step)

    def run(self) -> State:
        """Train to the end, or until all ranks agree to stop; the state is saved either way.

        Returns:
            done, requeue or stopped, the same on every rank.
        """
        if self.world.is_main:
            self.metrics = Metrics(self.run_dir, self.config.log.every, self.step, self.order.steps)
            self.metrics.forget_after(self.step)
        try:
            state = self._steps()
            if self.saved_at != self.step:
                self._save()
            if state == "done":
                self._evaluate()
        finally:
            if self.metrics:
                self.metrics.close()
        return state

    def _steps(self) -> State:
        batches = training_batches(
            self.source,
            self.order,
            self.strategy.rows(self.order.global_batch),
            range(self.step, self.order.steps),
        )
        pending: Agreement | None = None
        first = self.step + 1
        for batch in batches:
            loss, grad_norm = self._update(batch)
            if self.step == first:
                self._record("first_step", step=self.step, steps=self.order.steps)
            state = self._settle(pending)
            pending = self._propose(loss, grad_norm)
            if state != "done":
                self._record("signalled", step=self.step, state=state)
                self._settle(pending)
                return state
            self._save_or_evaluate_if_due()
        self._settle(pending)
        return "done"

    def _update(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One optimizer step; returns the sum of this rank's losses and the gradient's norm."""
        config = self.config
        set_seed(config.seed, "step", self.world.rank, self.step)
        rate = optim.learning_rate(config.optim, self.step, self.order.steps)
        optim.set_learning_rate(self.optimizer, rate)
        micro_batches = list(self._cut(batch))
        loss = self.strategy.forward_backward(micro_batches, self.order.count(self.step))
        max_norm = config.optim.clip_norm
        grad_norm = None if max_norm is None else self.strategy.clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss, grad_norm

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        rows = len(batch.weights)
        size = self.config.data.micro_batch or rows
        for start in range(0, rows, size):
            yield self._to_device(Batch(*(part[start : start + size] for part in batch)))

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(*(part.to(self.world.device, non_blocking=True) for part in batch))

    def _propose(self, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> Agreement:
        norm = torch.zeros_like(loss) if grad_norm is None else grad_norm
        # The norm is the same on every rank: a share of it from each adds up to it.
        values = torch.stack([loss, norm.to(loss) / self.world.world_size])
        return Agreement(self.step, values, [self.stop.by_person, self.stop.by_scheduler])

    def _settle(self, pending: Agreement | None) -> State:
        """Log the agreed step; returns done unless some rank was asked to stop."""
        if pending is None:
            return "done"
        loss, norm, by_person, by_scheduler = pending.result()
        if self.metrics:
            samples = self.order.count(pending.step - 1)
            clipped = self.config.optim.clip_norm is not None
            self.metrics.step(
                StepResult(pending.step, loss / samples, samples),
                epoch=round(pending.step * self.order.global_batch / self.order.size, 3),
                lr=optim.learning_rate(self.config.optim, pending.step - 1, self.order.steps),
                **({"grad_norm": norm} if clipped else {}),
            )
        if by_person:
            return "stopped"
        return "requeue" if by_scheduler else "done"

    def _save_or_evaluate_if_due(self) -> None:
        every = self.config.checkpoint.every
        if every and self.step % every == 0:
            self._save()
        epochs = self.config.train.evaluate_every
        if epochs and self.step < self.order.steps:
            interval = max(1, round(epochs * self.order.size / self.order.global_batch))
            if self.step % interval == 0:
                self._evaluate()

    def _save(self) -> None:
        started = time.perf_counter()
        state = self.strategy.state(self.optimizer)
        self.checkpoints.save(self.step, state, samples=self.step * self.order.global_batch)
        self.saved_at = self.step
        seconds = round(time.perf_counter() - started, 3)
        self._record("checkpointed", step=self.step, seconds=seconds)

    def _evaluate(self) -> None:
        """Loss and accuracy over the validation set, every sample counted once."""
        sums = torch.zeros(3, dtype=torch.float64)
        share = len(self.strategy.rows(self.order.global_batch))
        for batch in validation_batches(
            self.source, max(256, share), self.strategy.data_rank, self.strategy.data_ranks
        ):
            on_device = self._to_device(batch)
            outputs = self.strategy.forward(on_device)
            losses = per_sample_loss(outputs, on_device.targets) * on_device.weights
            hits = (outputs.argmax(-1) == on_device.targets).float()
            correct = hits.view(len(hits), -1).mean(1) * on_device.weights
            sums += torch.stack([losses.sum(), correct.sum(), on_device.weights.sum()]).cpu()
        dist.all_reduce(sums)
        loss, correct_count, count = sums.tolist()
        self.result = Evaluation(loss / count, correct_count / count)
        self._record(
            "evaluated", step=self.step, loss=self.result.loss, accuracy=self.result.accuracy
        )
        if self.metrics:
            self.metrics.say(
                f"step {self.step}/{self.order.steps}  validation loss {self.result.loss:.4f}  "
                f"accuracy {self.result.accuracy:.2%}"
            )

    def _record(self, event: str, **fields: object) -> None:
        if self.world.is_main:
            self.run_dir.record(event, **fields)
