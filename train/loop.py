"""The step: forward, backward, update, log, checkpoint, stop.

Nothing here asks which strategy trains. One small collective per step carries what all ranks must
know of it: the loss, the count and the wish to stop. Its result is read one step later, so neither
the network nor the GPU is waited for, and all ranks act on it after the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from train import garbage, optim
from train.checkpoint.saver import Saver
from train.config import Config, ConfigError
from train.data import identity
from train.data.loading import Loading
from train.data.order import Order, training_batches
from train.data.source import Batch, Source
from train.deadline import Deadline
from train.evaluate import Evaluation, evaluate
from train.faults import alike
from train.faults.response import FaultError, Faults
from train.faults.straggler import Stopwatch, Stragglers
from train.losses import Objective
from train.metrics import Metrics, StepResult
from train.outcome import Outcome
from train.parallel import Strategy
from train.run import FencedError, RunDir, State
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
        objective: Objective,
        stop: StopSignals,
    ) -> None:
        self.config = config
        self.world = world
        self.run_dir = run_dir
        self.source = source
        self.order = order
        self.strategy = strategy
        self.objective = objective
        self.update = Update(config, world, run_dir, order, strategy, optimizer, objective)
        self.stopwatch = Stopwatch(strategy.model, world.device)
        self.stragglers = Stragglers(world)
        self.faults = Faults(config, world, run_dir, order, strategy, objective, self.update)
        self.loading = self._make_loading()
        self.stop = stop
        self.deadline = Deadline(run_dir.job)
        self.saver = Saver(config, world, run_dir, self.update.state, self.deadline)
        self.metrics: Metrics | None = None
        self.speed_factors: dict[str, float] = {}
        self.step = 0
        self._pending: tuple[Agreement, Batch] | None = None
        self.result: Evaluation | None = None
        self.identity: dict[str, Any] = {}

    def _make_loading(self) -> Loading:
        return Loading(self.config.data, self.config.seed, self.world.rank, self.world.device)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        resumes = self.saver.open()
        self.identity = identity.check(
            self.world, self.run_dir, self.config.data.name, self.source, resumes
        )
        self.faults.resume()
        if self._load() is not None:
            self._record("resumed", step=self.step)

    def _load(self) -> int | None:
        """Take the state of the newest checkpoint, and return its step."""
        found = self.saver.resume()
        if not found:
            return None
        self.step, state = found
        self.update.load_state(state)
        return self.step

    def run(self) -> State:
        """Train to the end, or until all ranks agree to stop; the state is saved either way.

        Returns:
            done, requeue or stopped, the same on every rank.
        """
        if self.world.is_main:
            every = self.config.log.every
            self.metrics = Metrics(
                self.run_dir, every, self.step, self.order.steps, self.speed_factors
            )
            self.metrics.forget_after(self.step)
        try:
            state = self._all_steps()
            self.saver.finish(self.step, data=self.identity)
            if state == "done" and not self._evaluate():
                state = "stopped" if self.world.has_any(self.stop.by_person) else "requeue"
            self.saver.close()
            if state == "done" and not self.saver.problem:
                self.saver.remove_local()
        finally:
            if self.metrics:
                self.metrics.close()
        return "failed" if state == "done" and self.saver.problem else state

    def _all_steps(self) -> State:
        while True:
            try:
                with garbage.between_steps():
                    return self._steps()
            except FaultError:  # on all ranks; what is being saved is from before
                self.saver.close()
                if self.config.faults.then == "stop" or not self.faults.row:
                    raise
            self._pending = None
            self.loading = self._make_loading()  # it counts the samples anew that it reads again
            self.faults.leave_out(self._load())
            if self.metrics:
                self.metrics.forget_after(self.step)

    def _steps(self) -> State:
        batches = training_batches(
            self.source,
            self.order,
            self.strategy.rows(self.order.global_batch),
            range(self.step, self.order.steps),
            self.loading,
        )
        first = self.step + 1
        for batch in batches:
            if self.step in self.faults.left_out:
                self.step += 1
                continue
            garbage.collect(self.step)
            self.update.gradient(batch, self.step)
            # The GPU has this gradient to work on while the step before is settled.
            state = self._settle()
            updated = self.update.apply(batch, self.step)
            self.step += 1
            if self.step == first:
                self._record("first_step", step=self.step, steps=self.order.steps)
            self._pending = self._propose(updated, self.step), batch
            if state != "done":
                self._record("signalled", step=self.step, state=state)
                self._settle()
                return state
            self._save_or_evaluate_if_due()
        self._settle()
        return "done"

    def _propose(self, updated: Updated, step: int) -> Agreement:
        loss, grad_norm, skipped, fingerprint = updated
        loading, world_size = self.loading, self.world.world_size
        # What is the same on every rank: a share of it from each adds up to it.
        shares = [grad_norm.to(loss) / world_size, skipped.to(loss) / world_size]
        own = torch.zeros(2, world_size, device=loss.device)
        own[0, self.world.rank] = fingerprint
        own[1, self.world.rank] = self.stopwatch.take()
        # Ranks that hold parts of one replica read the same samples.
        unreadable = loading.unreadable * self.strategy.data_ranks / world_size
        more = [loading.take_waited() / world_size, unreadable, self.update.exhausted]
        ends = self.world.is_main and self.deadline.is_near(self.saver.seconds)
        flags = [self.stop.by_person, self.stop.by_scheduler or ends, *self.saver.flags()]
        values = torch.cat([own.flatten(), torch.stack([loss, *shares])])
        return Agreement(step, values, [*more, *flags])

    def _settle(self) -> State:
        """Act on what all ranks know of the step before; done unless some rank was to stop."""
        if self._pending is None:
            return "done"
        (agreement, batch), self._pending = self._pending, None
        prints, sums = _split(agreement.result(), self.world.world_size)
        times, sums = _split(sums, self.world.world_size)
        numbers, saving = _split(sums, len(Outcome._fields))
        outcome = Outcome(*numbers)
        self.saver.settle(saving)
        try:
            self.loading.refuse(self.world, outcome.unreadable)
        except ConfigError:  # on all ranks
            self.saver.close()
            raise
        if outcome.exhausted:
            self._do_again(agreement.step, batch)
            return self._settle()
        if outcome.skipped:
            self._repair(agreement.step, batch, outcome)
        else:
            self.faults.fine(agreement.step)
            self.stragglers.step(times)
            self._log(agreement, outcome)
            name, _ = alike.piece(self.strategy.model, agreement.step - 1)
            self.faults.compare(agreement.step, name, prints)
        if outcome.by_person:
            return "stopped"
        return "requeue" if outcome.by_scheduler else "done"

    def _repair(self, step: int, batch: Batch, outcome: Outcome) -> None:
        """After a step that changed nothing: the next gradient is made anew, without its traces."""
        self.update.drop()
        scaler = self.objective.scaler
        if scaler and math.isfinite(outcome.loss) and scaler.scale >= 1:
            # As it comes now and then: the scale is smaller now.
            self._record("overflowed", step=step, scale=float(scaler.scale))
            return
        self.faults.skipped(step, batch, outcome)

    def _do_again(self, step: int, batch: Batch) -> None:
        """Repeat the step before, for which some rank had no memory, in smaller pieces."""
        self.update.drop()
        size = self.update.split(len(batch.weights))
        self._record("out_of_memory", step=step, micro_batch=size)
        if self.metrics:
            self.metrics.say(f"step {step} did not fit into memory: again, {size} samples at once")
        self._pending = self._propose(self.update(batch, step - 1), step), batch

    def _log(self, agreement: Agreement, outcome: Outcome) -> None:
        if self.metrics:
            step = agreement.step
            samples = self.order.count(step - 1)
            unreadable = round(outcome.unreadable)
            self.metrics.step(
                StepResult(step, outcome.loss / samples, samples, outcome.waited, agreement.begun),
                epoch=round(step * self.order.global_batch / self.order.size, 3),
                lr=optim.learning_rate(self.config, step - 1, self.order.steps),
                grad_norm=outcome.grad_norm,
                **({"unreadable": unreadable} if unreadable else {}),
                **self.stragglers.fields(),
            )
            self._tell_of_stragglers(step)

    def _tell_of_stragglers(self, step: int) -> None:
        slow = self.stragglers.news()
        if slow and self.metrics:
            self._record("straggler", step=step, **slow)
            self.metrics.say("rank {rank} on {host} takes {times} times as long".format(**slow))

    def _save_or_evaluate_if_due(self) -> None:
        epochs = self.config.train.evaluate_every
        if epochs and self.step < self.order.steps:
            interval = max(1, round(epochs * self.order.size / self.order.global_batch))
            if self.step % interval == 0:
                self._settle()
                self._evaluate()
        if self.saver.is_due(self.step):
            self._leave_if_fenced()
            self._settle()  # only what all ranks know to be good is kept
            if not self.faults.row:
                self.saver.begin(self.step, data=self.identity)

    def _leave_if_fenced(self) -> None:
        try:
            self.run_dir.check_claim()
        except FencedError:
            raise
        except OSError:  # whoever publishes asks again, and a save that fails ends nothing
            pass

    def _evaluate(self) -> bool:
        """Whether there was time for it."""
        what = self.strategy, self.source, self.world, self.config, self.objective.per_sample
        with self.update.evaluated():
            result = evaluate(*what, self._is_asked_to_stop)
        if result is None:
            return False
        self.result = result
        self._record("evaluated", step=self.step, **self.result.figures())
        self.saver.evaluated(self.step, self.result.figures())
        if self.metrics:
            self.metrics.say(f"step {self.step}/{self.order.steps}  validation {self.result}")
        return True

    def _is_asked_to_stop(self) -> bool:
        ends = self.world.is_main and self.deadline.is_near(self.saver.seconds)
        return ends or self.stop.received is not None

    def _record(self, event: str, **fields: object) -> None:
        if self.world.is_main:
            self.run_dir.record(event, **fields)


def _split(numbers: Sequence[float], place: int) -> tuple[list[float], list[float]]:
    return list(numbers[:place]), list(numbers[place:])
