"""What is done about a step that changed nothing, or that ranks did not compute alike?"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint import Checkpointer
from train.config import Config
from train.data.order import Order
from train.data.source import Batch
from train.faults.memory import faults_of
from train.faults.witness import BACKWARD, NOWHERE, Finding, Witness
from train.losses import Objective
from train.outcome import Outcome
from train.parallel import Strategy
from train.run import RunDir, write_atomic
from train.update import Update
from train.world import World

SHOWN = 8
"""Samples that a message names."""
PATIENCE = 60.0
"""Seconds for which the training waits until the weights of a fault are on disk."""
LEFT_OUT = "left-out.json"


class FaultError(RuntimeError):
    """Training cannot go on; the message says why, and what to do."""


@dataclass(frozen=True)
class Fault:
    """One step that changed nothing, as `faults/step-…` and the event `skipped` tell it.

    Attributes:
        step: updates there would have been after it.
        kind: what was wrong.
        place: where it was seen first.
        rank: who saw it; of world_size.
        samples: numbers of the training samples that are to blame, as far as that is known.
        micro_batch: samples that the rank computed at once.
        rows: its places in the global batch, from and to.
        stream: of the rank's random numbers.
    """

    step: int
    kind: str
    place: str
    rank: int
    world_size: int
    samples: list[int]
    loss: str
    grad_norm: str
    micro_batch: int
    rows: tuple[int, int]
    stream: int


class Faults:
    """Writes down what went wrong, and decides whether it was too much; all ranks call it alike.

    Attributes:
        row: the last steps, if they changed nothing; what they led to is not worth keeping.
        left_out: numbers of updates that are not to be done.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        run_dir: RunDir,
        order: Order,
        strategy: Strategy,
        objective: Objective,
        update: Update,
    ) -> None:
        self._options = config.faults
        self._batch = config.data.global_batch
        self._world = world
        self._run_dir = run_dir
        self._order = order
        self._strategy = strategy
        self._objective = objective
        self._update = update
        self.row: list[int] = []
        self._returned_to: int | None = None
        self._diverged = False
        self._skipped: list[int] = []
        self.left_out: set[int] = set()
        keep = self._options.evidence
        self._evidence = Checkpointer(faults_of(run_dir), world, keep) if keep else None

    def resume(self) -> None:
        """Learn which steps an earlier attempt has left out; remove what it has half written."""
        if self._evidence:
            self._evidence.clean()
        path = faults_of(self._run_dir) / LEFT_OUT
        text = path.read_text() if self._world.is_main and path.exists() else "[]"
        self.left_out = {int(step) for step in json.loads(self._world.broadcast_text(text))}

    def skipped(self, step: int, batch: Batch, outcome: Outcome) -> None:
        """Find out why this step changed nothing, with the weights as they were, and tell it.

        Args:
            step: updates there would have been after it.
            batch: this rank's rows of it.

        Raises:
            FaultError: it was the last of as many in a row as are allowed.
        """
        spike = math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)
        witness = Witness(self._strategy.model, self._objective)
        with witness:
            self._update.gradient(batch, step - 1)
        self._update.drop()
        fault = self._spike(witness, step, outcome) if spike else self._nan(witness, step, outcome)
        self._keep(fault)
        self.row.append(step)
        self._skipped.append(step)
        names = ", ".join(map(str, fault.samples[:SHOWN])) + " …" * (len(fault.samples) > SHOWN)
        text = f"step {step} changed nothing: {fault.kind}, first in {fault.place}"
        if fault.kind != "a loss spike":
            text += f" (rank {fault.rank} of {fault.world_size})"
        self._tell("skipped", f"{text}; samples {names or 'unknown'}", **asdict(fault))
        if len(self.row) >= self._options.limit:
            raise FaultError(
                f"{_steps(len(self.row))} changed nothing, the last one because of "
                f"{fault.kind} in {fault.place}: look at `python -m train replay "
                f"{self._run_dir.path} {step}`, lower optim.lr or set optim.clip_norm, or let "
                "faults.then=back leave such batches out"
            )

    def summary(self) -> dict[str, str]:
        """Rows for the summary of the run."""
        if not self._skipped:
            return {}
        return {"steps that changed nothing": f"{len(self._skipped)}, last {self._skipped[-1]}"}

    def fine(self, step: int) -> None:
        """The update that made it `step` of them changed the weights."""
        self.row.clear()
        if step > max(self.left_out, default=step):  # so to go back has helped
            self._returned_to = None

    def leave_out(self, saved_at: int | None) -> None:
        """Decide to go on from a checkpoint without the batches of the last faults.

        Raises:
            FaultError: there is no checkpoint, or it did not help the last time.
        """
        if saved_at is None or saved_at == self._returned_to:
            why = "there is no checkpoint" if saved_at is None else "it helped nothing before"
            raise FaultError(
                f"{_steps(len(self.row))} changed nothing, and faults.then=back cannot "
                f"go back: {why}. Lower optim.lr or set optim.clip_norm"
            )
        self._returned_to = saved_at
        self.left_out |= {step - 1 for step in self.row}
        steps = list(self.row)
        self.row.clear()
        if self._world.is_main:
            faults_of(self._run_dir).mkdir(exist_ok=True)
            path = faults_of(self._run_dir) / LEFT_OUT
            write_atomic(path, json.dumps(sorted(self.left_out)) + "\n")
        text = f"back to step {saved_at}; steps {steps[0]} to {steps[-1]} will be left out"
        self._tell("went_back", text, step=saved_at, left_out=steps)

    def compare(self, step: int, tensor: str, prints: list[float]) -> None:
        """Look whether ranks that should hold the same weights have the same fingerprint.

        Args:
            tensor: whose fingerprint this rank's is; other stages have others.
            prints: of every rank.

        Raises:
            FaultError: they differ, and the configuration says to stop.
        """
        if self._diverged:
            return
        odd = []
        for group in self._strategy.replicas:
            found = [prints[rank] for rank in group]
            usual = max(found, key=found.count)
            if found.count(usual) < len(found):  # of two, nobody knows which one is right
                tie = 2 * found.count(usual) <= len(found)
                odd += [
                    rank for rank, value in zip(group, found, strict=True) if tie or value != usual
                ]
        if not odd:
            return
        self._diverged = True
        tensor = self._world.broadcast_text(tensor, odd[0])
        ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        text = (
            f"{ranks} of {self._world.world_size}: other weights than replicas of the same ones, "
            f"seen in {tensor} after step {step}; look for a faulty device or unlike CPUs, and "
            "start again from a checkpoint before it"
        )
        self._tell("diverged", text, step=step, ranks=odd, tensor=tensor)
        if self._options.divergence == "stop":
            raise FaultError(text)

    def _nan(self, witness: Witness, step: int, outcome: Outcome) -> Fault:
        finding, rank, size = witness.finding(), self._world.rank, self._world.world_size
        # Of two that saw it in the same part of a step, the one that computes that part earlier.
        turn = size - 1 - rank if finding.stage == BACKWARD else rank
        kind = "a loss" if not math.isfinite(outcome.loss) else "a gradient"
        fault = self._fault(step, f"{kind} that is not finite", finding, outcome)
        first = self._first(finding.stage * size + turn, fault)
        # Stages of a pipeline but the last see no losses, and cannot say whose sample it was.
        blamed = self._first(0 if fault.samples else 1, fault)
        return replace(first, samples=first.samples or blamed.samples)

    def _spike(self, witness: Witness, step: int, outcome: Outcome) -> Fault:
        largest, rows = witness.largest(SHOWN)
        finding = Finding(NOWHERE, "the samples with the largest losses", rows)
        return self._first(-largest, self._fault(step, "a loss spike", finding, outcome))

    def _fault(self, step: int, kind: str, finding: Finding, outcome: Outcome) -> Fault:
        rows = self._strategy.rows(self._batch)
        count = self._order.count(step - 1)
        blamed = range(len(rows)) if finding.stage == BACKWARD else finding.rows
        places = [rows[row] for row in blamed if row < len(rows) and rows[row] < count]
        samples = [self._order.samples(step - 1, range(at, at + 1))[0][0] for at in places[:64]]
        return Fault(
            step,
            kind,
            finding.place,
            self._world.rank,
            self._world.world_size,
            samples,
            str(outcome.loss / count),
            str(outcome.grad_norm),
            self._update.micro_batch or len(rows),
            (rows.start, rows.stop),
            self._strategy.stream,
        )

    def _first(self, turn: float, fault: Fault) -> Fault:
        """The fault of the rank whose turn is first."""
        first = torch.tensor([turn], dtype=torch.float64)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        owner = torch.tensor([self._world.rank if first == turn else self._world.world_size])
        dist.all_reduce(owner, dist.ReduceOp.MIN)
        found: dict[str, Any] = json.loads(
            self._world.broadcast_text(json.dumps(asdict(fault)), int(owner))
        )
        return Fault(**found)

    def _keep(self, fault: Fault) -> None:
        if self._evidence is None:
            return
        state = {"model": self._update.state()["model"]}
        self._evidence.begin(fault.step, state, fault=asdict(fault))
        outcome = self._evidence.drain(PATIENCE)
        if outcome and outcome.problem:
            text = f"the weights of step {fault.step} could not be kept: {outcome.problem}"
            self._tell("evidence_lost", text, step=fault.step)

    def _tell(self, event: str, text: str, **fields: Any) -> None:
        if self._world.is_main:
            print(f"rollcall: {text}", flush=True)
            self._run_dir.record(event, **fields)


def _steps(count: int) -> str:
    return "a step" if count == 1 else f"{count} steps in a row"
