"""Optimizers of the user's are tried before the run: sharded, resumed, with unused weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from user_state import WORDS

# torch 2.11 computes the mean of a divided row.
IS_OLD = torch.__version__.startswith("2.11")
OF_A_ROW = (0, "") if IS_OLD else (2, "fails with sharded weights: aten.")


@pytest.mark.parametrize(
    ("optimizer", "ranks", "strategy", "code", "message"),
    [
        ("user_state:Own", 2, "zero3", 0, ""),
        ("RAdam", 2, "zero2", 0, ""),
        ("user_state:Own norm", 2, "zero1", 0, ""),
        ("user_state:Own norm", 2, "zero3", 2, "with sharded weights its steps differ by"),
        ("user_state:Own limit", 2, "zero3", 2, "with sharded weights its steps differ by"),
        ("user_state:Own centered", 2, "zero3", 0, ""),
        ("user_state:Own centered Row", 2, "zero3", *OF_A_ROW),
        ("Adafactor", 2, "zero3", 2, "fails with sharded weights"),
        ("user_state:Own shards", 2, "zero3", 2, "fails with sharded weights: rank 1 cannot"),
        ("user_state:Own whole", 2, "zero3", 0, "was not tried before the run: rank 1 cannot"),
        ("user_state:Own counter", 1, "single", 2, "after a save and a resume its steps differ"),
        ("user_state:Own noise", 2, "zero3", 0, ""),
        ("user_state:Own decay", 1, "single", 0, "had not used before a save its steps differ"),
    ],
)
def test_an_optimizer_is_tried_before_the_run(
    tmp_path: Path, optimizer: str, ranks: int, strategy: str, code: int, message: str
) -> None:
    name, *kind = optimizer.split()
    model = "Row" if kind[1:] else "Net"
    words = [*WORDS[:4], f"model.name=user_state:{model}", "train.loss=user_state:cross_entropy"]
    words += [f"optim.name={name}", *(f"optim.args.kind={one}" for one in kind[:1])]
    words += [f"parallel.strategy={strategy}", "train.steps=1", f"run.root={tmp_path}"]
    run = Ranks(ranks, words, tmp_path / "logs")
    assert run.wait() == [code] * ranks, run.output()
    assert message in run.output()
    assert bool(message) == ("optim.name=" in run.output()), run.output()
