"""zero2, zero3 and hsdp train models with weights that FSDP2 cannot shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import user_state
from ranks import Ranks, logged_steps, train
from user_state import WORDS

from rollcall.records.run_dir import RunDir
from rollcall.train.weights.deferred import Draws


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "zero3"), pytest.param(4, "hsdp", marks=pytest.mark.long)]
)
def test_odd_weights_stay_whole(tmp_path: Path, ranks: int, strategy: str) -> None:
    """The run is resumed by one process; it equals a plain loop."""
    with Draws(0):
        model = user_state.Odd()
    expected = user_state.by_hand(model, user_state.cross_entropy, 6)
    words = [*WORDS, "model.name=user_state:Odd", "train.loss=user_state:cross_entropy"]
    words += [f"run.root={tmp_path}", "run.name=odd", "data.micro_batch=4"]
    spread = [f"parallel.strategy={strategy}", "train.steps=3"]
    train(ranks, [*words, *spread], tmp_path / "spread")
    train(1, [*words, "train.steps=6"], tmp_path / "alone")
    lines = logged_steps(RunDir(tmp_path, "odd"))
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_reads_whole_weights_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    with Draws(0):
        model = user_state.Net()

    def penalized(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        penalty: torch.Tensor = sum(w.square().sum() for w in model.parameters())  # type: ignore[assignment]
        return user_state.cross_entropy(outputs, targets) + penalty

    words = [*WORDS, "model.name=user_state:Net", "train.loss=user_state:penalized"]
    words += ["parallel.strategy=ddp", "data.micro_batch=4", "train.steps=6"]
    train(2, [*words, f"run.root={tmp_path}", "run.name=penalized"], tmp_path / "logs")
    ours = [line["loss"] for line in logged_steps(RunDir(tmp_path, "penalized"))]
    assert ours == pytest.approx(user_state.by_hand(model, penalized, 6), rel=1e-6)


def test_a_loss_that_reads_shards_is_refused(tmp_path: Path) -> None:
    words = [*WORDS, "model.name=user_state:Net", "train.loss=user_state:penalized"]
    run = Ranks(2, [*words, "parallel.strategy=zero3", f"run.root={tmp_path}"], tmp_path)
    assert run.wait() == [2, 2]
    assert "computes with weights of the model, of which each rank has a shard" in run.output()
    assert "Traceback" not in run.output()
