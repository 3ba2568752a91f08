"""A member of the step gets the sums of what all ranks report, for one all-reduce per step."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from collectives import Collectives
from ranks import together

import rollcall
from rollcall.cli.installation import ROOT
from rollcall.config import parse
from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.train import models
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.data import sets
from rollcall.train.metrics import Metrics
from rollcall.train.numerics import losses, optim
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.agreement import Action, Step, one_slot
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.signals import StopSignals
from rollcall.train.ranks.stop import Stop
from rollcall.train.ranks.world import World
from rollcall.train.state import TrainingState
from rollcall.train.task import Task
from rollcall.train.trainer import Trainer

WORDS = [
    "digits",
    "model.name=mlp",
    "log.every=1",
    "train.steps=9",
    "data.global_batch=16",
    "device=cpu",
]
WORDS += ["checkpoint.every=null", "train.evaluate_every=null", "parallel.strategy=ddp"]
LAST = 4
"""The step about which the member below says that training should stop."""


@dataclass(frozen=True)
class Reported:
    """The numbers of the member below."""

    number: float
    large: float
    scalar: float | torch.Tensor
    slots: list[float | torch.Tensor]


class Own:
    """A member as somebody might write it: it reports numbers and stops the run."""

    def __init__(self, rank: int, collectives: Collectives) -> None:
        self._rank = rank
        self._collectives = collectives
        self.sent: list[int] = []
        self.settled: list[Any] = []

    def report(self) -> Reported:
        """Two numbers, a scalar tensor, and a vector with a slot for each rank."""
        self.sent.append(sum(self._collectives.counts.values()))
        slots = one_slot(0.5 + self._rank, self._rank, 2)
        large = (2**24, 1)[self._rank]  # fp32 does not hold their sum
        rollcall.measure("mean", self._rank)
        rollcall.measure("sum", torch.tensor([1.0, 2.0]), "sum")
        if self._rank == 1:
            rollcall.measure("max", -1.5, "max")
        return Reported(1 + self._rank, large, torch.tensor(0.25), slots)

    def settle(self, step: Step, agreed: Reported) -> Action:
        """Remember the sums."""
        self.settled.append([step.number, vars(agreed), step.loss > 0])
        return Action.STOP if step.number == LAST else Action.CONTINUE


def test_a_member_sees_its_sums_and_costs_no_collective(tmp_path: Path) -> None:
    together(2, _train, tmp_path)
    expected = {"number": 3.0, "large": 2**24 + 1, "scalar": 0.5, "slots": [0.5, 1.5]}
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["printed"].count("step 1: the ranks use") == 1 - rank
        # The sums are read while the next step is under way, which is then the last one.
        assert (found["state"], found["step"]) == ("stopped", LAST + 1)
        assert found["settled"] == [[step, expected, True] for step in range(1, LAST + 2)]
        # From one report to the next: ours, and DDP's, whose gradients fit into one bucket.
        sent = found["sent"]
        # After the first step ranks tell each other once which weights the loss did not use, and
        # which names were measured; after the second, which values training has moved.
        counts = [after - before for before, after in itertools.pairwise(sent)]
        assert counts[2:] == [2] * (LAST - 2)
    lines = LoggedStep.read(tmp_path / "run")
    # A report comes after its step, so what it measures belongs to the next one.
    measured = [{name: line.more[name] for name in ("mean", "sum", "max")} for line in lines[1:]]
    assert measured == [{"mean": 0.5, "sum": 6.0, "max": -1.5}] * LAST
    assert "mean" not in lines[0].more


def _documented(run: Run) -> Any:
    """Return the member that CONTRIBUTING.md shows, which warns at once."""
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "class HostMemory" in block]
    found: dict[str, Any] = {"__name__": "host_memory"}
    exec(compile(code, "CONTRIBUTING.md", "exec", flags=0, dont_inherit=True), found)
    return found["HostMemory"](run, limit_gb=0.001)


def _train(rank: int, directory: Path) -> None:
    world = World.join("cpu")
    config = parse([*WORDS, f"run.root={directory}"])[1]
    run = Run(config, world, RunDir(directory, "run"))
    if world.is_main:
        run.run_dir.create()
    world.barrier()
    objective = losses.Objective(losses.build("cross_entropy"))
    strategy = Strategy(config, world, objective)
    source = sets.load(config.data, world)
    deadline = Deadline(run.run_dir.job)
    stop = Stop(world, StopSignals(), deadline)
    task = Task(run, source, strategy, stop)
    strategy.place(models.build(config.model, source), task.example())
    strategy.warm_up(task.example())
    optimizer = strategy.optimizer(partial(optim.build, config.optim))
    state = TrainingState(run, strategy, optimizer, objective)
    saver = Saver(run, state.read, deadline)
    printed = io.StringIO()  # the server that forks the ranks has the output of an earlier test
    said = contextlib.redirect_stdout(printed)
    with Collectives() as collectives, run.measures.of_process(), said:
        own = Own(rank, collectives)
        metrics, documented = Metrics(run, task, {}, dict), _documented(run)
        trainer = Trainer(run, task, state, saver, [own, metrics, documented, stop])
        trainer.resume()
        end = trainer.train()
    found: dict[str, Any] = {
        "state": end,
        "step": run.progress.step,
        "settled": own.settled,
        "sent": own.sent,
    }
    found["printed"] = printed.getvalue()
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))
    world.leave()
