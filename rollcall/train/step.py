"""The steps of a training, top down: what happens in a step, and in which order.

    Steps.run          every batch: gradient, agreement on the step before, update, exchange
    Steps.settle       what all ranks agreed about a step; `recovery/policy.py` if it failed
    Gradient.compute   forward and backward passes, and how many targets count
    Updater.apply      division, clipping and the optimizer, or nothing if a number is not finite

Nothing here knows which strategy trains. Neither the network nor a GPU is waited for: the numbers
of a step are summed over the ranks by one all-reduce, and read while the next gradient is being
computed. So all ranks act on them after the same step.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollcall.config import ConfigError
from rollcall.records.run_dir import State
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch
from rollcall.train.numerics import optim, schedules
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.parallel.part import UnusedWeights, explain
from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.agreement import Action, Agreement, FaultError, Members, Number, Step
from rollcall.train.ranks.clock import OPTIMIZER, OTHER, clock
from rollcall.train.ranks.run import Run
from rollcall.train.recovery import memory
from rollcall.train.recovery.policy import Recovery
from rollcall.train.state import TrainingState, Written
from rollcall.train.task import Task

STATES: dict[Action, State] = {
    Action.CONTINUE: "done",
    Action.STOP: "stopped",
    Action.REQUEUE: "requeue",
}
COLLECT_EVERY = 100
"""Steps between two collections of garbage."""


@dataclass(frozen=True)
class Numbers:
    """Sums over the ranks about an update; each rank reports its share of common facts."""

    loss: Number  # the weighted losses of this rank's samples
    grad_norm: Number  # before clipping
    skipped: Number  # 1 if the weights did not change
    exhausted: Number  # whether this rank ran out of memory
    unused: Number  # whether the loss did not use all weights, and the strategy must know
    count: Number  # samples that count, each in so far as its targets do
    counted: Number  # the same of all steps of this attempt

    def about(self, number: int, steps: int, seconds: float) -> Step:
        """Derive the facts about a step from its sums."""
        count, norm = float(self.count), float(self.grad_norm)
        loss, is_skipped = float(self.loss) / (count or 1), bool(self.skipped)
        return Step(number, steps, seconds, is_skipped, loss, norm, count, bool(self.counted))


class Steps:
    """The steps of a run on this rank; every rank makes each call together."""

    def __init__(
        self,
        run: Run,
        task: Task,
        state: TrainingState,
        members: Members,
        before_refusal: Callable[[], object] = lambda: None,  # is called before settling raises
    ) -> None:
        self._run, self._progress, self._task = run, run.progress, task
        self._members, self._before_refusal = members, before_refusal
        self.gradient = Gradient(run, task.order, state, task.all_count)
        self._updater = Updater(run, task.order, state)
        self.recovery = Recovery(run, task.order, self.gradient, state.strategy, state.objective)
        self._newest: tuple[Batch, int]  # the batch and number of the newest update
        self._asked = Action.CONTINUE
        reports = [self._updater.report, *(member.report for member in members)]
        self._agreement = Agreement(reports, run.world.device)

    def run(self, between: Callable[[int], None]) -> Action:
        """Train to the end, or until all ranks agree to stop; call `between` after each step."""
        progress, gradient = self._progress, self.gradient
        first, log_every = progress.step + 1, self._run.config.log.every
        self._agreement.restart(any(getattr(m, "wants_every_step", False) for m in self._members))
        for batch in () if self._task.is_over else self._task.batches(progress.step):
            number = progress.step + 1
            if progress.step in self.recovery.left_out:
                progress.step = number
                continue
            if number % COLLECT_EVERY == 0:
                gc.collect(1)  # on all ranks together, so that none waits for another

            # The gradient; meanwhile all ranks learn about the step before, whose fault drops it.
            gradient.compute(batch, number)
            action = self.settle()
            if gradient.is_dropped:
                gradient.compute(batch, number)

            # The update, whose numbers are summed over the ranks from now on.
            self._apply(batch, number)
            progress.step = number
            clock.step()
            self._agreement.send(number, self._updater.skipped, number % log_every == 0)

            # Between two steps.
            if number == first:
                self._run.record("first_step", step=first, steps=progress.steps)
            if action is not Action.CONTINUE:
                self._run.record("signalled", step=number, state=STATES[action])
                self.settle(now=True)
                return action
            between(number)
            if self._task.is_over:
                break
        self.settle(now=True)
        return Action.CONTINUE

    def rewind(self) -> bool:
        """Undo the passes of an unfinished step, alone; return True if the state is whole."""
        step = self._progress.step
        if self._updater.begun != step or self._updater.skipped:
            return False
        if self.gradient.number > step:
            self.gradient.drop()
        return True

    def settle(self, now: bool = False) -> Action:
        """Act on what all ranks agreed, `now` if they must; ConfigError or FaultError ends all."""
        try:
            while exchange := self._agreement.receive(now):
                numbers, *sums = exchange.sums
                if numbers.exhausted or numbers.unused:
                    self._repeat(bool(numbers.unused))
                else:
                    step = numbers.about(exchange.step, exchange.steps, exchange.seconds)
                    self._act_on(step, sums)
        except (ConfigError, FaultError):
            self._before_refusal()
            raise
        return self._asked  # also by what a save or an evaluation has settled

    def _repeat(self, is_unused: bool) -> None:
        batch, number = self._newest
        self.recovery.prepare_repeat(is_unused, batch, number)
        self.gradient.compute(batch, number)
        self._apply(batch, number)
        self.gradient.is_dropped = True  # that of the next step
        self._agreement.send(number, self._updater.skipped, is_due=True)

    def _act_on(self, step: Step, sums: list[Any]) -> None:
        if self._updater.unused is not None:
            self.recovery.tell_unused(self._updater.unused)
            self._updater.unused = None
        if step.is_skipped:
            self.recovery.recover(step, self._newest[0])
        elif self.recovery.is_idle or self.recovery.row or self.recovery.left_out:
            self.recovery.succeeded(step.number)
        for member, own in zip(self._members, sums, strict=True):
            self._asked = max(self._asked, member.settle(step, own))

    def _apply(self, batch: Batch, number: int) -> None:
        self._updater.apply(self.gradient, number)
        self._newest = batch, number
        if self._run.measures.step:
            self._run.measures.end_step(self._updater.skipped)


class Gradient:
    """The gradient of one batch, and how many of the targets of all ranks count in it."""

    def __init__(
        self, run: Run, order: Order, state: TrainingState, all_count: bool = False
    ) -> None:
        """Do not count targets if the data promise that `all_count`."""
        self._run, self._order, self._state = run, order, state
        self._strategy, self._objective = state.strategy, state.objective
        self._all_count = all_count and state.strategy.apart == 1
        strategy, function = state.strategy, state.objective.loss.function
        # Ranks that take a step together.
        self._device, self._ranks = run.world.device, run.world.world_size // strategy.apart
        self._sum = partial(dist.all_reduce, group=strategy.group, async_op=True)
        self._written: Written | None = Written(strategy.model, function, strategy.written)
        size = run.config.data.micro_batch
        self.micro_batch = None if size == "auto" else size  # samples at once; None for all
        self.loss: torch.Tensor  # the sum of the weighted losses of this rank's samples
        self.samples = self.number = 0  # samples of all ranks; the number of the step
        self.is_dropped, self.is_exhausted, self.is_unused = True, False, False
        self._counted: float | torch.Tensor
        self._counting: dist.Work | None

    @doing("computing gradients")
    def compute(self, batch: Batch, number: int) -> None:
        """Compute a gradient: NaN on all ranks, or MemoryError, if one runs out of memory."""
        set_seed(self._run.config.seed, "step", self._strategy.stream, number - 1)
        if self._state.buffers:
            self._state.buffers.keep()
        if self._written:
            batch = self._written.keep(number, batch)
        self._objective.weights.clear()
        loss = self._objective.loss
        if loss.turns:
            loss.turn = loss.turn_of(number)
        self.is_dropped = self.is_exhausted = self.is_unused = False
        self.samples, problem, self.number = self._order.count(number - 1), "", number

        # Begin to count the targets, while the passes are computed.
        self._counted, self._counting = self.samples, None
        if not self._all_count and not loss.is_weighted:
            own = loss.count(batch.targets, batch.weights).to(self._device)
            self._add_up(own * self._strategy.data_ranks / self._ranks)
        if self._strategy.penalizes:
            self._strategy.weigh(loss.weight(batch.targets, batch.weights), self.samples)

        # The passes of each micro-batch.
        rows, size = len(batch.weights), self.micro_batch or len(batch.weights)
        parts = [batch] if size >= rows else batch.split(size)
        try:
            self.loss = self._strategy.forward_backward(parts, self.samples)
            if self._written and not self._written.are_any() and not loss.turns:
                self._written = None
        except UnusedWeights:
            self.is_unused, self.loss = True, torch.full((), torch.nan, device=self._device)
        except (MemoryError, RuntimeError) as error:
            problem = self._of_memory(error, number)
        if problem:  # only now has the exception released the activations
            memory.rejoin(self._run, self._strategy.finish_with_nan, problem, max(1, size // 2))
            self.is_exhausted, self.loss = True, torch.full((), torch.nan, device=self._device)

    def _of_memory(self, error: MemoryError | RuntimeError, number: int) -> str:
        """Describe an error of a pass that ran out of memory; raise any other."""
        if not memory.is_exhausted(error):
            explain(error)
            raise error
        memory.snapshot(self._run, number)
        return str(error) or type(error).__name__

    def count(self) -> float | torch.Tensor:
        """Return how many samples count over all ranks, each in so far as its targets do."""
        if self._objective.loss.is_weighted:  # the loss returns the weights
            own, _ = self._objective.sums_of_weights(self._device)
            self._add_up(own * self._strategy.counts_loss * self._strategy.apart)
        if self._counting:
            self._counting.wait()
        counted = self._counted
        return counted.item() if isinstance(counted, torch.Tensor) and counted.is_cpu else counted

    def _add_up(self, own: torch.Tensor) -> None:
        self._counted = own
        self._counting = self._sum(own) if self._ranks > 1 else None

    def drop(self) -> list[str]:
        """Undo `compute`, to be called again before an update; return names of what it changed."""
        self.is_dropped, changed = True, list[str]()
        self._state.optimizer.zero_grad()
        self._strategy.forget()
        if self._written:
            changed = self._written.names()
            self._written.restore(self.number)
        if self._state.buffers:
            self._state.buffers.restore(torch.ones((), dtype=torch.bool, device=self._device))
        self._run.measures.end_step(torch.tensor(True))
        return changed


class Updater:
    """Applies gradients; one whose norm, the same on all ranks, is not finite changes nothing."""

    def __init__(self, run: Run, order: Order, state: TrainingState) -> None:
        self._config, self._world, self._order = run.config, run.world, order
        self._state = state
        self._schedule = schedules.Schedule(run.config)
        self._ratios = schedules.ratios(run.config.optim, state.optimizer)
        self._local: Any = state.local_optimizer  # of this rank's weights
        self._counted: float | torch.Tensor = 0.0
        self._newest: tuple[torch.Tensor, torch.Tensor, bool, bool, float | torch.Tensor]
        self.skipped = torch.tensor(False)  # whether the newest update was skipped, on every rank
        self.begun = 0  # the newest step that has begun to change the weights
        # Names of weights that the first step does not use; None once all ranks know.
        self.unused: list[str] | None = []

    @doing("updating weights")
    def apply(self, gradient: Gradient, number: int) -> None:
        """End a step, which counts from 1: change the weights if the gradient is finite."""
        clock.enter(OPTIMIZER)
        state, loss = self._state, gradient.loss
        scaler, device = state.objective.scaler, self._world.device

        # Divide by what counts, instead of by the number of samples; clip.
        count = gradient.count()
        divisor = scaler.scale if scaler else None
        nonzero: float | torch.Tensor
        if isinstance(count, torch.Tensor):  # on a GPU, which is not waited for
            nonzero = torch.where(count > 0, count, gradient.samples).float()
        else:
            nonzero = count if count > 0 else float(gradient.samples)
        if nonzero is not count or count != gradient.samples:
            share = torch.as_tensor(nonzero / gradient.samples, device=device)
            divisor = share if divisor is None else share * divisor
        norm = state.strategy.clip(self._config.optim.clip_norm, divisor)
        if self.unused is not None:
            self.unused = state.without_gradient()

        # Skip the update if a number is not finite, or the loss is a spike.
        skipped = overflowed = ~norm.isfinite().to(device)
        if state.spikes:
            skipped = skipped | state.spikes.found(loss, nonzero, skipped)

        # The optimizer, and what follows the weights.
        rate = self._schedule(number - 1, self._order.steps)
        for group, ratio in zip(state.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio
        self.begun = number
        own, reads = self._local, skipped.is_cuda and not self._config.parallel.cpu_offload
        if reads and all(group.get("fused") for group in own.param_groups):
            own.found_inf = skipped.float()  # the kernels read this on the device
            state.optimizer.step()
            own.found_inf = None
        elif not skipped:  # this waits for the GPU
            state.optimizer.step()
        if self.unused is not None:
            optim.check_state(self._config.optim, self._local)
        if state.buffers:
            state.buffers.restore(skipped)
        if state.ema:
            state.ema.update(skipped)
        if scaler:
            scaler.update(overflowed)
        state.optimizer.zero_grad()
        clock.enter(OTHER)

        self.skipped, self._counted = skipped, self._counted + count
        self._newest = loss, norm, gradient.is_exhausted, gradient.is_unused, count

    def report(self) -> Numbers:
        """Return the numbers of the newest update; few updates are asked for them."""
        loss, norm, is_exhausted, is_unused, count = self._newest
        ranks, counts = self._world.world_size, self._state.strategy.counts
        return Numbers(
            loss=loss,
            grad_norm=norm.to(loss) / ranks,
            skipped=self.skipped / ranks,
            exhausted=is_exhausted,
            unused=is_unused,
            count=count * counts,
            counted=self._counted * counts,
        )
