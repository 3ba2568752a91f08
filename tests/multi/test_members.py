"""A member of the step gets the sums of what all ranks report, for one all-reduce per step."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from collectives import Collectives
from ranks import FORKSERVER, TIMEOUT, free_port

from rollcall.config import parse
from rollcall.deadline import Deadline
from rollcall.run_dir import RunDir
from rollcall.train import models
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.data import sets
from rollcall.train.dist.agreement import Action, one_slot
from rollcall.train.dist.run import Run
from rollcall.train.dist.signals import StopSignals
from rollcall.train.dist.stop import Stop
from rollcall.train.dist.world import World
from rollcall.train.numerics import losses, optim
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.task import Task
from rollcall.train.trainer import Trainer
from rollcall.train.update import Update

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


class Own:
    """A member as somebody might write it: it reports numbers and stops the run."""

    def __init__(self, rank: int, collectives: Collectives) -> None:
        self._rank = rank
        self._collectives = collectives
        self.sent: list[int] = []
        self.settled: list[Any] = []

    def report(self) -> Mapping[str, float | torch.Tensor]:
        """Two numbers, a scalar tensor, and a vector with a slot for each rank."""
        self.sent.append(sum(self._collectives.counts.values()))
        slots = one_slot(0.5 + self._rank, self._rank, 2)
        large = (2**24, 1)[self._rank]  # fp32 does not hold their sum
        numbers = {"own.number": 1 + self._rank, "own.large": large}
        return {**numbers, "own.scalar": torch.tensor(0.25), "own.slots": slots}

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Remember the sums."""
        own = {name: value for name, value in agreed.items() if name.startswith("own.")}
        self.settled.append([step, own, agreed["loss"] > 0])
        return Action.STOP if step == LAST else Action.CONTINUE


def test_a_member_sees_its_sums_and_costs_no_collective(tmp_path: Path) -> None:
    port = free_port()
    ranks = [FORKSERVER.Process(target=_train, args=(rank, port, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT)
        rank.kill()
    expected = {"own.number": 3.0, "own.scalar": 0.5, "own.slots": [0.5, 1.5]}
    expected |= {"own.large": 2**24 + 1}
    for file in [tmp_path / f"rank-{number}.json" for number in range(2)]:
        found = json.loads(file.read_text())
        # The sums are read while the next step is under way, which is then the last one.
        assert (found["state"], found["step"]) == ("stopped", LAST + 1)
        assert found["settled"] == [[step, expected, True] for step in range(1, LAST + 2)]
        # From one report to the next: ours, and DDP's, whose gradients fit into one bucket.
        sent = found["sent"]
        # After the first step ranks tell each other once which weights the loss did not use.
        counts = [after - before for before, after in itertools.pairwise(sent)]
        assert counts == [3, *[2] * (LAST - 1)]


def _train(rank: int, port: int, directory: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
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
    stop = Stop(world, StopSignals(), deadline, lambda: 0.0)
    task = Task(run, source, strategy, objective.loss, stop)
    strategy.place(models.build(config.model, source), task.example())
    strategy.warm_up(task.example())
    optimizer = strategy.optimizer(partial(optim.build, config.optim))
    update = Update(run, task.order, strategy, optimizer, objective)
    saver = Saver(run, update.state, deadline)
    with Collectives() as collectives:
        own = Own(rank, collectives)
        trainer = Trainer(run, task, update, saver, [stop, own])
        trainer.resume()
        state = trainer.train()
    found = {"state": state, "step": trainer.step, "settled": own.settled, "sent": own.sent}
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))
    world.leave()
