"""The step: forward, backward, update, log, checkpoint, stop.

Nothing here asks which strategy trains. One small collective per step carries what all ranks must
know of it: the loss, the count and the wish to stop. Its result is read one step later, so neither
the network nor the GPU is waited for, and all ranks act on it after the same step.
"""

from __future__ import annotations

import time

import torch

from train import optim
from train.checkpoint import Checkpointer
from train.config import Config
from train.data.order import Order, training_batches
from train.data.source import Source
from train.evaluate import Evaluation, evaluate
from train.metrics import Metrics, StepResult
from train.parallel import Strategy
from train.run import RunDir, State
from train.stop import Agreement, StopSignals
from train.update import Update, Updated
from train.world import World


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
        self.update = Update(config, world, order, strategy, optimizer)
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
            updated = self.update(batch, self.step)
            self.step += 1
            if self.step == first:
                self._record("first_step", step=self.step, steps=self.order.steps)
            state = self._settle(pending)
            pending = self._propose(updated)
            if state != "done":
                self._record("signalled", step=self.step, state=state)
                self._settle(pending)
                return state
            self._save_or_evaluate_if_due()
        self._settle(pending)
        return "done"

    def _propose(self, updated: Updated) -> Agreement:
        loss, grad_norm = updated
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
        self.result = evaluate(self.strategy, self.source, self.world, self.order.global_batch)
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
