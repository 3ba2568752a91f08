"""Recover from a step that cannot be applied: repeat it, or find its cause and continue or stop."""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch

from rollcall.messages.text import listed
from rollcall.system.files import read_value, write_atomic
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch
from rollcall.train.numerics.losses import Objective
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.agreement import FaultError, Step
from rollcall.train.ranks.run import Run
from rollcall.train.recovery.nonfinite import BACKWARD, NOWHERE, Finding, Witness

SAMPLES_SHOWN = 8
"""Samples that a message names."""
SAMPLES_RECORDED = 64
LEFT_OUT = "left-out.json"


class Repeatable(Protocol):
    """The part that computes gradients, again if it must."""

    micro_batch: int | None

    def compute(self, batch: Batch, number: int) -> None:
        """Compute the gradient of this rank's rows for a step, which counts from 1."""

    def drop(self) -> list[str]:
        """Undo what `compute` did; return the names of what it changed."""


@dataclass(frozen=True)
class Fault:
    """One skipped step, as the event `skipped` records it."""

    step: int  # from 1
    kind: str  # what was wrong
    place: str  # where it was seen first, by `rank`
    rank: int
    world_size: int
    samples: list[int]  # numbers of the training samples that caused it, as far as known
    loss: str  # of the whole step; a text because JSON knows no NaN
    grad_norm: str


class Recovery:
    """Repeats steps, and ends a run after too many skipped ones; on all ranks together."""

    def __init__(
        self, run: Run, order: Order, gradient: Repeatable, strategy: Strategy, objective: Objective
    ) -> None:
        self._run, self._world, self._order = run, run.world, order
        self._gradient, self._strategy, self._objective = gradient, strategy, objective
        # The newest steps, if they were skipped: a state that is not worth saving.
        self.row: list[int] = []
        self.left_out: set[int] = set()  # updates (from 0) that are not done, after a rollback
        self._rolled_back_to: int | None = None
        self._skipped: list[int] = []
        self.is_idle = True  # no step of the run has changed the weights
        self._cause = ""  # of the newest step that did not
        self._directory = run.run_dir.faults

    def resume(self) -> None:
        """Read which steps an earlier attempt left out."""
        # What cannot be read is found again: the rollback repeats.
        found = read_value(self._directory / LEFT_OUT) if self._world.is_main else []
        steps = self._world.broadcast(found if isinstance(found, list) else [])
        self.left_out = {step for step in steps if isinstance(step, int)}

    def prepare_repeat(self, is_unused: bool, batch: Batch, number: int) -> None:
        """Prepare to repeat a step in a way that works; raise MemoryError if there is none."""
        changed = listed(self._gradient.drop())
        if self._objective.scaler:
            self._objective.scaler.undo()
        if is_unused:
            self._strategy.allow_unused()
            text = f"step {number} does not use all weights; repeating it"
            self._run.tell("unused_weights", text, step=number)
            return
        rows = self._gradient.micro_batch or len(batch.weights)
        if rows == 1:
            raise MemoryError(
                "memory ran out with a single sample: choose a smaller model, "
                "model.activation_checkpointing=blocks, or parallel.strategy=zero3"
            )
        size = self._gradient.micro_batch = math.ceil(rows / 2)
        text = f"step {number} ran out of memory; repeating it with {size} samples at once"
        if changed := self._world.first_problem(changed):
            more = f"forward() changes {changed} once in each of these, so the result differs"
            text = f"{text}; {more}"
        self._run.tell("out_of_memory", text, step=number, micro_batch=size)

    def tell_unused(self, names: list[str]) -> None:
        """Name the weights that the loss of an attempt's first step did not use, on some rank."""
        if text := self._run.world.first_problem(listed(names)):
            text = f"the loss does not use {text}; steps that do not use a weight do not change it"
            self._run.tell("unused_weights", text)

    def succeeded(self, step: int) -> None:
        """Note that a step, counted from 1, changed the weights."""
        self.is_idle = False
        self.row.clear()
        if step > max(self.left_out, default=step):  # the rollback helped
            self._rolled_back_to = None

    def recover(self, step: Step, batch: Batch) -> None:
        """Repeat a skipped step to find the cause; FaultError after too many in a row."""
        self._gradient.drop()
        scaler, is_spike = self._objective.scaler, math.isfinite(step.grad_norm)
        if scaler and math.isfinite(step.loss) and scaler.scale >= 1 and not is_spike:
            # An overflow now and then is normal in fp16; the scale is smaller now.
            self._run.record("overflowed", step=step.number, scale=float(scaler.scale))
            return
        with Witness(self._strategy.model, self._objective) as witness:
            self._gradient.compute(batch, step.number)
        self._gradient.drop()
        is_spike = is_spike and math.isfinite(step.loss)
        fault = self._spike(step, witness) if is_spike else self._nonfinite(step, witness)
        self.row.append(step.number)
        self._skipped.append(step.number)
        self._report(fault, is_spike)
        self._cause = (
            f"{_steps(self.row)} skipped, the last one because of {fault.kind} in "
            f"{fault.place}: lower optim.lr, set optim.clip_norm, or leave them out by "
            "faults.on_repeated=rollback"
        )
        if len(self.row) >= self._run.config.faults.max_skipped_steps:
            raise FaultError(self._cause)

    def finish(self) -> None:
        """Raise FaultError if all steps of the run were skipped, unless fp16 seeks its scale."""
        if self.is_idle and self._cause:
            raise FaultError(self._cause)
        if self.is_idle and self._objective.scaler:
            self._run.warn(
                "the weights have not changed, because the gradients of all steps overflowed in "
                "fp16: train more steps, or choose precision=bf16"
            )

    def roll_back(self, saved_at: int | None) -> None:
        """Leave out the skipped steps after a rollback; raise FaultError if it cannot help."""
        if saved_at is None or saved_at == self._rolled_back_to:
            reason = f"the last rollback to step {saved_at} did not help"
            if saved_at is None:
                reason = "the run has not saved a checkpoint yet"
            raise FaultError(
                f"{_steps(self.row)} skipped, and faults.on_repeated=rollback cannot continue: "
                f"{reason}. Lower optim.lr or set optim.clip_norm"
            )
        self._rolled_back_to = saved_at
        steps, self.row = self.row, []
        self.left_out |= {step - 1 for step in steps}
        if self._world.is_main:
            self._directory.mkdir(exist_ok=True)
            write_atomic(self._directory / LEFT_OUT, json.dumps(sorted(self.left_out)) + "\n")
        text = f"rolled back to step {saved_at}; leaving out steps {steps[0]} to {steps[-1]}"
        self._run.tell("rolled_back", text, step=saved_at, left_out=steps)

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        rows, size = {}, self._gradient.micro_batch
        if size != self._run.config.data.micro_batch:
            rows["memory"] = f"data.micro_batch={size} fits from the start"
        if self._skipped:
            rows["skipped steps"] = f"{len(self._skipped)}; the last was step {self._skipped[-1]}"
        return rows

    def _fault(self, step: Step, kind: str, finding: Finding) -> Fault:
        rows = self._strategy.rows(self._run.config.data.global_batch)
        suspects = range(len(rows)) if finding.stage == BACKWARD else finding.rows
        count = self._order.count(step.number - 1)
        places = [rows[row] for row in suspects if row < len(rows) and rows[row] < count]
        spans = [range(place, place + 1) for place in places[:SAMPLES_RECORDED]]
        return Fault(
            step.number,
            kind,
            finding.place,
            rank=self._world.rank,
            world_size=self._world.world_size,
            samples=[self._order.samples(step.number - 1, span)[0][0] for span in spans],
            loss=str(step.loss),
            grad_norm=str(step.grad_norm),
        )

    def _nonfinite(self, step: Step, witness: Witness) -> Fault:
        finding, rank, size = witness.finding(), self._world.rank, self._world.world_size
        # If two ranks saw it in the same part of a step, the one that computes that part first.
        turn = size - 1 - rank if finding.stage == BACKWARD else rank
        what = "a gradient" if math.isfinite(step.loss) else "a loss"
        fault = self._fault(step, f"{what} that is not finite", finding)
        first = self._first(finding.stage * size + turn, fault)
        # Only the last stage of a pipeline sees losses and can name the samples.
        named = self._first(0 if fault.samples else 1, fault)
        return replace(first, samples=first.samples or named.samples)

    def _spike(self, step: Step, witness: Witness) -> Fault:
        largest, rows = witness.largest(SAMPLES_SHOWN)
        finding = Finding(NOWHERE, "the samples with the largest losses", rows)
        return self._first(-largest, self._fault(step, "a loss spike", finding))

    def _first(self, turn: float, fault: Fault) -> Fault:
        """Return the fault of the rank with the smallest turn, on every rank."""
        turns = self._world.gather(torch.tensor([turn], dtype=torch.float64)).flatten().tolist()
        return Fault(**self._world.broadcast(asdict(fault), turns.index(min(turns))))

    def _report(self, fault: Fault, is_spike: bool) -> None:
        samples = ", ".join(map(str, fault.samples[:SAMPLES_SHOWN])) or "unknown"
        more = ", …" if len(fault.samples) > SAMPLES_SHOWN else ""
        where = "" if is_spike else f" (rank {fault.rank} of {fault.world_size})"
        text = f"step {fault.step} was skipped: {fault.kind}, first in {fault.place}{where}"
        self._run.tell("skipped", f"{text}; samples {samples}{more}", **asdict(fault))


def _steps(row: list[int]) -> str:
    return "a step was" if len(row) == 1 else f"{len(row)} steps in a row were"
