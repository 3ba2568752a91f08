"""Numbers that a user measures, in one process; tests/multi/train/test_members.py has two ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import rollcall
from rollcall.train.ranks.measures import Measures
from rollcall.train.ranks.world import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World.join("cpu")
    yield world
    world.leave()


def line(measures: Measures, world: World) -> dict[str, float]:
    """Return what a line of metrics.jsonl gets after two exchanges: the first agrees on names."""
    for _ in range(2):
        measures.settle(measures.take(world), world)
        measures.agree(world)
    return measures.line()


def test_values_of_several_steps_become_one(world: World) -> None:
    measures = Measures()
    rollcall.measure("nobody", 1.0)  # no run in this process
    with measures.of_process():
        for number in range(1, 4):
            rollcall.measure("mean", torch.tensor([number, 3.0 * number], requires_grad=True))
            rollcall.measure("sum", number, "sum")
            rollcall.measure("sum", torch.tensor([True, True, False]), reduce="sum")
            rollcall.measure("max", torch.tensor([-number, -9]), "max")
            measures.end_step(torch.tensor(number == 2))
        with measures.closed():  # an evaluation
            rollcall.measure("sum", math.inf, "sum")
    assert line(measures, world) == {"max": -1.0, "mean": 4.0, "sum": 8.0}
    assert line(measures, world) == {}


@pytest.mark.parametrize(
    ("name", "reduce", "message"),
    [
        ("loss", "mean", "the name is taken"),
        ("val_mine", "mean", "the name is taken"),
        ("known", "sum", "expected mean, sum or max, and the same each time"),
        ("new", "median", "expected mean, sum or max"),
    ],
)
def test_names_that_cannot_be_logged_are_refused(name: str, reduce: str, message: str) -> None:
    measures = Measures()
    measures.add("known", 1.0)
    with pytest.raises(ValueError, match=message):
        measures.add(name, 1.0, reduce)  # type: ignore[arg-type]
