"""One optimizer step: forward and backward passes of every micro-batch, clipping, the update.

An update whose gradient is not finite changes nothing. The norm of the gradient is the same on
every rank and is tested on the device, so no rank waits for another or for its GPU.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollcall.activity import doing
from rollcall.config import ConfigError
from rollcall.text import listed
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.clock import OPTIMIZER, OTHER, clock
from rollcall.train.dist.run import Run
from rollcall.train.numerics import optim
from rollcall.train.numerics.ema import Ema, drop_gathered
from rollcall.train.numerics.losses import Objective
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.parallel.part import UnusedWeights
from rollcall.train.parallel.shard import local_optimizer
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.recovery import memory
from rollcall.train.recovery.policy import Recovery
from rollcall.train.recovery.spikes import Spikes

NO, YES = torch.tensor(False), torch.tensor(True)


class Update:
    """Changes the weights by one batch at a time, and holds everything that updates change.

    As a member of the step it reports the loss, the norm of the gradient, and whether the update
    was skipped or ran out of memory.
    """

    def __init__(
        self,
        run: Run,
        order: Order,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
    ) -> None:
        self._run = run
        self._config = config = run.config
        self._device = run.world.device
        self._order = order
        self._strategy = strategy
        self._optimizer = optimizer
        self._objective = objective
        self._schedule = optim.Schedule(config)
        self._ratios = optim.ratios(config.optim, optimizer)
        self._weights = dict(strategy.model.named_parameters())
        self._buffers = _Buffers(strategy.model)
        self._ema = Ema(strategy.model, config.optim.ema) if config.optim.ema else None
        factor = config.faults.spike_factor
        self._spikes = Spikes(factor, self._device) if factor else None
        self._loss: torch.Tensor | None = None
        self._batch: Batch | None = None
        self._exhausted = self._unused = self._uncounted = False
        self._must_allow_unused = self._must_add_missing = self._is_repeated = False
        self._counts: bool | torch.Tensor = True  # whether any target of the newest update does
        # Whether some targets do not count, so that ranks must add them up in every step; None
        # before the first step of an attempt.
        self._adds_missing: bool | None = None
        self.skipped: torch.Tensor  # whether the newest update was skipped, on every rank
        self._idle: list[str] | None = []  # weights without a gradient; None after the message
        self._missing: dict[int, int] = {}  # by step, from 0: targets that do not count
        self._numbers: tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]
        self._flags: tuple[bool, bool, bool]
        self.step = 0  # updates done, including the newest one
        size = config.data.micro_batch
        self.micro_batch = None if size == "auto" else size  # samples at once; None for all
        self.recovery = Recovery(run, order, strategy, objective)

    @doing("computing gradients")
    def gradient(self, batch: Batch, step: int, missing: float = 0.0) -> None:
        """Begin an update (`step` counts from 0): compute its gradient, which `apply` uses.

        If a rank runs out of memory, the gradient becomes NaN on all ranks, and none applies it; or
        MemoryError is raised, if the strategy cannot let the others know. So it does on the first
        `missing` targets, which do not count, because the other ranks expect none.
        """
        set_seed(self._config.seed, "step", self._strategy.stream, step)
        self._buffers.keep()
        self._objective.weights.clear()
        micro_batches = list(self._cut(batch))
        self._exhausted, self._unused, problem = False, False, ""
        self._uncounted = bool(missing) and self._adds_missing is False
        count = math.nan if self._uncounted else self._order.count(step)
        try:
            self._loss = self._strategy.forward_backward(micro_batches, count)
        except UnusedWeights:
            self._unused = True
            self._loss = torch.full((), torch.nan, device=self._device)
        except (MemoryError, RuntimeError) as error:
            if not memory.is_exhausted(error):
                raise
            memory.snapshot(self._run, step + 1)
            problem = str(error) or type(error).__name__
        if problem:  # only now has the exception released the activations
            self._rejoin(problem, len(batch.weights))

    @doing("updating weights")
    def apply(self, batch: Batch, step: int, missing: float = 0.0) -> None:
        """End an update: change the weights if the gradient is finite."""
        if self._loss is None:
            self.gradient(batch, step, missing)
        clock.enter(OPTIMIZER)
        loss, self._loss = self._loss, None
        assert loss is not None
        scaler = self._objective.scaler
        count = self._count(batch, step)
        norm = self._strategy.clip(self._config.optim.clip_norm, self._divisor(count, step))
        if self._idle is not None:
            named = dict(self._strategy.model.named_parameters())
            self._idle = [n for n, one in named.items() if one.requires_grad and one.grad is None]
            if late := [*(named.keys() - self._weights)]:
                raise ConfigError(
                    f"model.name={self._config.model.name}: the first forward() made "
                    f"{listed(late)}, which no optimizer knows; make weights in __init__()"
                )
        skipped = overflowed = self._is_not_finite(norm)
        if self._spikes:
            skipped = skipped | self._spikes.found(loss, count, skipped)
        rate = self._schedule(step, self._order.steps)
        optim.set_learning_rate(self._optimizer, rate, self._ratios)
        self._optimize(skipped)
        if self._idle is not None:
            optim.check_state(self._config.optim, local_optimizer(self._optimizer))
        self._buffers.restore(skipped)
        if self._ema:
            self._ema.update(skipped)
        if scaler:
            scaler.update(overflowed)
        if type(self._optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            for weight in self._weights.values():  # the method takes longer than a small model
                weight.grad = None
        else:
            self._optimizer.zero_grad()
        self.step, self._batch, self.skipped = step + 1, batch, skipped
        # `report` may follow the next gradient.
        self._flags = self._exhausted, self._unused, self._uncounted
        self._numbers = loss, norm, count
        clock.enter(OTHER)

    @property
    def must_exchange(self) -> bool:
        """Whether ranks must add up numbers after this step, because some targets do not count."""
        return bool(self._adds_missing)

    def report(self) -> Mapping[str, float | torch.Tensor]:
        """Return the numbers of the newest update.

        `loss` sums to the weighted loss of all samples and `count` to their weight (0 if no target
        counts), `grad_norm` to the norm before clipping, `skipped` to 1 if the weights did not
        change, and `exhausted` to the number of ranks that ran out of memory.
        """
        loss, norm, count = self._numbers
        exhausted, unused, uncounted = self._flags
        ranks = self._run.world.world_size
        return {
            "loss": loss,
            "grad_norm": norm.to(loss) / ranks,
            "skipped": self.skipped.to(loss) / ranks,
            "exhausted": exhausted,
            "unused": unused,
            "uncounted": uncounted,
            "count": count * self._run.world.is_main * self._counts,
        }

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Repeat the update if a rank could not compute its gradient; recover if it was skipped."""
        if self._adds_missing and not self._is_repeated:  # else it is about the next step but one
            self._missing[step] = round(agreed["missing"])
        self._is_repeated = False
        self._must_allow_unused = bool(agreed["unused"])
        self._must_add_missing = bool(agreed["uncounted"])
        if agreed["exhausted"] or self._must_allow_unused or self._must_add_missing:
            return Action.REPEAT
        self._tell_of_idle()
        if agreed["skipped"]:
            self._recover(step, agreed)
        else:
            self.recovery.succeeded(step)
        return Action.CONTINUE

    def repeat(self) -> None:
        """Compute the newest update again, and all from now on, as it will work.

        Raises:
            MemoryError: the micro-batch is one sample already.
        """
        assert self._batch is not None
        self.drop()
        self._is_repeated = True
        if self._objective.scaler:
            self._objective.scaler.undo()
        if self._must_add_missing:
            self._adds_missing = True
        if self._must_allow_unused:
            self._strategy.allow_unused()
            text = f"step {self.step} does not use all weights; repeating it"
            self._run.tell("unused_weights", text, step=self.step)
        elif not self._must_add_missing:
            self._halve(len(self._batch.weights))
        self.apply(self._batch, self.step - 1)

    def _halve(self, rows: int) -> None:
        """Halve the number of samples at once from now on."""
        if (self.micro_batch or rows) == 1:
            raise MemoryError(
                "memory ran out with a single sample: choose a smaller model, "
                "model.activation_checkpointing=blocks, or parallel.strategy=zero3"
            )
        size = self.micro_batch = math.ceil((self.micro_batch or rows) / 2)
        text = f"step {self.step} ran out of memory; repeating it with {size} samples at once"
        self._run.tell("out_of_memory", text, step=self.step, micro_batch=size)

    def try_gradient(self, batch: Batch) -> bool:
        """Compute a gradient that is not used; return whether this rank had enough memory."""
        self.gradient(batch, 0)
        fits = not self._exhausted
        self.drop()
        return fits

    def drop(self) -> None:
        """Undo what `gradient` did; `apply` will compute the gradient again."""
        self._loss = None
        self._optimizer.zero_grad()
        self._strategy.forget()
        self._buffers.restore(torch.ones((), dtype=torch.bool, device=self._device))

    def _recover(self, step: int, agreed: Mapping[str, Any]) -> None:
        """Drop the next gradient, which the skipped update may have spoiled, and find the cause."""
        assert self._batch is not None
        self.drop()
        scaler, is_spike = self._objective.scaler, math.isfinite(agreed["grad_norm"])
        if scaler and math.isfinite(agreed["loss"]) and scaler.scale >= 1 and not is_spike:
            # An overflow now and then is normal in fp16; the scale is smaller now.
            self._run.record("overflowed", step=step, scale=float(scaler.scale))
        else:
            self.recovery.skipped(self, step, self._batch, agreed)

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        rows = {}
        if self.micro_batch != self._config.data.micro_batch:
            rows["memory"] = f"data.micro_batch={self.micro_batch} fits from the start"
        return rows | self.recovery.summary()

    def evaluated(self) -> AbstractContextManager[None]:
        """Give the model the weights to evaluate while the context is open."""
        self._strategy.share(self._buffers.now())
        ema = self._ema if self._config.optim.evaluate_ema else None
        return ema.in_place() if ema else nullcontext()

    def state(self) -> dict[str, Any]:
        """Return what updates change under global names, to save or to fill in place."""
        self._strategy.share(self._buffers.now())  # so that all saved ones belong together
        optim.complete_state(local_optimizer(self._optimizer))
        state = self._strategy.state(self._optimizer)
        more: dict[str, Any] = {
            "ema": self._ema,
            "scaler": self._objective.scaler,
            "spikes": self._spikes,
        }
        state |= {name: one.state() for name, one in more.items() if one}
        if not self._config.checkpoint.save_frozen:
            drop_frozen(self._strategy.model, state)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned and a checkpoint has filled."""
        self._missing.clear()
        self._adds_missing = None
        if not self._config.checkpoint.save_frozen:  # torch wants all weights
            whole = self._strategy.state(self._optimizer)
            state = {**state, "model": {**whole["model"], **state["model"]}}
        self._strategy.load_state(self._optimizer, state)
        drop_gathered(self._strategy.model)

    def _tell_of_idle(self) -> None:
        """Name the weights that the loss of an attempt's first step did not use."""
        if self._idle is None:
            return
        names, self._idle = self._idle, None
        if text := self._run.world.first_problem(listed(names)):
            text = f"the loss does not use {text}; steps that do not use a weight do not change it"
            self._run.tell("unused_weights", text)

    def _count(self, batch: Batch, step: int) -> float | torch.Tensor:
        """Return by what to divide the sum of the losses: 1 for each sample that counts in full.

        If targets do not count in some steps, how many travels with the numbers of the step before.
        Only the first step of an attempt, or after steps that were left out, needs an all-reduce.
        """
        loss, samples = self._objective.loss, self._order.count(step)
        if self._adds_missing is not False:
            self._missing = {known: n for known, n in self._missing.items() if known >= step}
            if step not in self._missing:
                self._missing[step] = self._add_missing(batch, step)
            self._adds_missing = bool(self._adds_missing or self._missing[step])
        if not self._adds_missing and not loss.is_weighted:
            return samples
        size = loss.size(batch.targets)
        targets = samples * size - self._missing.get(step, 0)
        count, self._counts = max(1, targets) / size, targets > 0
        if not loss.is_weighted:
            return count
        weights = self._objective.sums_of_weights(self._device)
        dist.all_reduce(weights)
        mean = weights[0] / weights[1]
        self._counts = mean > 0
        return (count * torch.where(mean > 0, mean, 1)).float()

    def _add_missing(self, batch: Batch, step: int) -> int:
        rows = self._strategy.rows(self._order.global_batch)
        mine = self._order.count_of(step, rows)
        own = self._objective.loss.missing(batch.targets, batch.weights, mine)
        missing = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(missing)
        return round(float(missing) * self._strategy.data_ranks / self._run.world.world_size)

    def _is_not_finite(self, norm: torch.Tensor) -> torch.Tensor:
        """Return it on the device, without waiting for it."""
        if norm.is_cpu and self._device.type == "cpu":  # a fifth of the time of two operations
            return NO if math.isfinite(norm.item()) else YES
        return ~norm.isfinite().to(self._device)

    def _divisor(self, count: float | torch.Tensor, step: int) -> torch.Tensor | None:
        """Return what still divides the gradient, which was divided by the number of samples."""
        scaler, samples = self._objective.scaler, self._order.count(step)
        scale = scaler.scale if scaler else None
        if not isinstance(count, torch.Tensor):
            if count == samples:
                return scale
            count = torch.full((), count, device=self._device)
        return count / samples * (1 if scale is None else scale)

    def _rejoin(self, problem: str, rows: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._strategy.finish_with_nan():
            half = max(1, (self.micro_batch or rows) // 2)
            with contextlib.suppress(OSError):  # the disk is full
                self._run.run_dir.create()  # `micro_batch.search` comes before it
                memory.propose(self._run.run_dir, half)
            world = self._run.world
            raise MemoryError(
                f"rank {world.rank} on {world.host} ran out of memory: {problem}. Start the same "
                f"command again to continue with data.micro_batch={half}"
            )
        self._loss = torch.full((), torch.nan, device=self._device)
        self._exhausted = True

    def _optimize(self, skipped: torch.Tensor) -> None:
        own: Any = local_optimizer(self._optimizer)
        fused = all(group.get("fused") for group in own.param_groups)
        if fused and skipped.is_cuda and not self._config.parallel.cpu_offload:
            own.found_inf = skipped.float()  # the kernels read this on the device
            self._optimizer.step()
            own.found_inf = None
        elif not skipped:  # this waits for the GPU
            optim.step(self._optimizer)

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        rows = len(batch.weights)
        size = self.micro_batch or rows
        if size >= rows:
            yield batch.to(self._device)
            return
        for start in range(0, rows, size):
            part = batch.map(lambda tensor, at=start: tensor[at : at + size])  # type: ignore[misc]
            yield part.to(self._device)


def drop_frozen(model: nn.Module, state: dict[str, Any]) -> None:
    """Leave out the parameters that are not trained, for `checkpoint.save_frozen=false`."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in named if not weight.requires_grad}
    for part in {"model", "ema"} & state.keys():
        state[part] = {name: one for name, one in state[part].items() if name not in frozen}


class _Buffers:
    """The buffers that a forward pass changes or replaces, such as BatchNorm's statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._buffers, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self._kept: list[torch.Tensor] = []

    def now(self) -> list[torch.Tensor]:
        return [buffers[name] for buffers, name in self._places]

    def keep(self) -> None:
        self._kept = [buffers[name].clone() for buffers, name in self._places]

    def restore(self, where: torch.Tensor) -> None:
        """Restore the copies if `where` is true, on the device."""
        for (buffers, name), kept in zip(self._places, self._kept, strict=True):
            buffer = buffers[name]
            if buffer.shape == kept.shape:
                buffer.copy_(torch.where(where.to(buffer.device), kept, buffer))
