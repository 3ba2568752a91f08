"""What happens after a skipped step: find its cause, then continue, roll back or stop."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from rollcall.activity import doing
from rollcall.records.files import read_value, write_atomic
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import Store
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch
from rollcall.train.dist.agreement import FaultError
from rollcall.train.dist.run import Run
from rollcall.train.numerics.losses import Objective
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.recovery.memory import faults_of
from rollcall.train.recovery.nonfinite import BACKWARD, NOWHERE, Finding, Witness

SAMPLES_SHOWN = 8
"""Samples that a message names."""
SAMPLES_RECORDED = 64
SNAPSHOT_SECONDS = 60.0
"""How long training waits until the weights of a skipped step are on disk."""
LEFT_OUT = "left-out.json"


class Repeatable(Protocol):
    """The part of an update that is needed to repeat it."""

    micro_batch: int | None

    def gradient(self, batch: Batch, step: int) -> None:
        """Compute the gradient of this rank's rows for the update `step`, from 0."""

    def drop(self) -> None:
        """Undo what `gradient` did."""

    def state(self) -> dict[str, Any]:
        """Return the state to save; `model` holds the weights."""


@dataclass(frozen=True)
class Fault:
    """One skipped step, as `faults/step-…` and the event `skipped` record it."""

    step: int  # from 1
    kind: str  # what was wrong
    place: str  # where it was seen first, by `rank`
    rank: int
    world_size: int
    samples: list[int]  # numbers of the training samples that caused it, as far as known
    loss: str  # of the whole step; a text because JSON knows no NaN
    grad_norm: str
    micro_batch: int
    rows: tuple[int, int]  # first and last (exclusive) place of the rank's rows in the global batch
    stream: int  # the rank's stream of random numbers


class Recovery:
    """Records skipped steps and ends the run after too many; all ranks make each call together."""

    def __init__(self, run: Run, order: Order, strategy: Strategy, objective: Objective) -> None:
        self._run, self._world, self._order = run, run.world, order
        self._strategy, self._objective = strategy, objective
        # The newest steps, if they were skipped: a state that is not worth saving.
        self.row: list[int] = []
        self.left_out: set[int] = set()  # updates (from 0) that are not done, after a rollback
        self._rolled_back_to: int | None = None
        self._skipped: list[int] = []
        self._directory = faults_of(run.run_dir)
        keep = run.config.faults.replay_snapshots
        self._snapshots = Engine(Store(self._directory, run.world, keep)) if keep else None

    def resume(self) -> None:
        """Read which steps an earlier attempt left out, and remove its half-written snapshots."""
        if self._snapshots:
            self._snapshots.clean()
        # What cannot be read is found again: the rollback repeats.
        found = read_value(self._directory / LEFT_OUT) if self._world.is_main else []
        steps = self._world.broadcast(found if isinstance(found, list) else [])
        self.left_out = {step for step in steps if isinstance(step, int)}

    def succeeded(self, step: int) -> None:
        """Note that a step, counted from 1, changed the weights."""
        self.row.clear()
        if step > max(self.left_out, default=step):  # the rollback helped
            self._rolled_back_to = None

    def skipped(
        self, update: Repeatable, step: int, batch: Batch, agreed: Mapping[str, Any]
    ) -> None:
        """Repeat a skipped step to find its cause, with the weights unchanged, and report it.

        Steps count from 1; `agreed` holds `loss`, summed over the samples, `count` and `grad_norm`.
        Raise FaultError if `faults.max_skipped_steps` in a row were skipped.
        """
        with Witness(self._strategy.model, self._objective) as witness:
            update.gradient(batch, step - 1)
        update.drop()
        is_spike = math.isfinite(agreed["loss"]) and math.isfinite(agreed["grad_norm"])
        make = partial(self._fault, update, step, agreed)
        fault = self._spike(witness, make) if is_spike else self._nonfinite(witness, make)
        self._keep(fault, update)
        self.row.append(step)
        self._skipped.append(step)
        self._report(fault, is_spike)
        if len(self.row) >= self._run.config.faults.max_skipped_steps:
            raise FaultError(
                f"{_steps(self.row)} skipped, the last one because of {fault.kind} in "
                f"{fault.place}: see `rollcall replay {self._run.run_dir.path} {step}`, lower "
                "optim.lr, set optim.clip_norm, or leave them out by faults.on_repeated=rollback"
            )

    def roll_back(self, saved_at: int | None) -> None:
        """Leave out the skipped steps, after loading the checkpoint of step `saved_at`, if any.

        Raise FaultError if there is none, or the last rollback to it did not help.
        """
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
        if not self._skipped:
            return {}
        return {"skipped steps": f"{len(self._skipped)}; the last was step {self._skipped[-1]}"}

    def _fault(
        self, update: Repeatable, step: int, agreed: Mapping[str, Any], kind: str, finding: Finding
    ) -> Fault:
        rows = self._strategy.rows(self._run.config.data.global_batch)
        suspects = range(len(rows)) if finding.stage == BACKWARD else finding.rows
        count = self._order.count(step - 1)
        places = [rows[row] for row in suspects if row < len(rows) and rows[row] < count]
        spans = [range(place, place + 1) for place in places[:SAMPLES_RECORDED]]
        return Fault(
            step,
            kind,
            finding.place,
            rank=self._world.rank,
            world_size=self._world.world_size,
            samples=[self._order.samples(step - 1, span)[0][0] for span in spans],
            loss=str(agreed["loss"] / (agreed["count"] or 1)),
            grad_norm=str(agreed["grad_norm"]),
            micro_batch=update.micro_batch or len(rows),
            rows=(rows.start, rows.stop),
            stream=self._strategy.stream,
        )

    def _nonfinite(self, witness: Witness, make: Callable[[str, Finding], Fault]) -> Fault:
        finding, rank, size = witness.finding(), self._world.rank, self._world.world_size
        # If two ranks saw it in the same part of a step, the one that computes that part first.
        turn = size - 1 - rank if finding.stage == BACKWARD else rank
        fault = make("a gradient that is not finite", finding)
        if not math.isfinite(float(fault.loss)):
            fault = replace(fault, kind="a loss that is not finite")
        first = self._first(finding.stage * size + turn, fault)
        # Only the last stage of a pipeline sees losses and can name the samples.
        named = self._first(0 if fault.samples else 1, fault)
        return replace(first, samples=first.samples or named.samples)

    def _spike(self, witness: Witness, make: Callable[[str, Finding], Fault]) -> Fault:
        largest, rows = witness.largest(SAMPLES_SHOWN)
        finding = Finding(NOWHERE, "the samples with the largest losses", rows)
        return self._first(-largest, make("a loss spike", finding))

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

    @doing("saving a checkpoint", may_take_long=True)
    def _keep(self, fault: Fault, update: Repeatable) -> None:
        if self._snapshots is None:
            return
        facts = {"fault": asdict(fault), **self._order.facts(fault.step - 1)}
        self._snapshots.begin(fault.step, {"model": update.state()["model"]}, **facts)
        outcome = self._snapshots.drain(SNAPSHOT_SECONDS)
        if outcome and outcome.problem:
            text = f"could not keep the weights of step {fault.step}: {outcome.problem}"
            self._run.tell("snapshot_lost", text, step=fault.step)


def _steps(row: list[int]) -> str:
    return "a step was" if len(row) == 1 else f"{len(row)} steps in a row were"
