"""Any number of ranks trains the same model as one: losses, weights and the evaluation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from ranks import logged_steps, train

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export

# 1,437 training samples in batches of 50: the last batch of the run is short, and neither it nor
# the whole ones divide evenly by 3 or 4 ranks.
# A gradient jumps where a ReLU opens and where the largest of a pool changes: on some machines the
# rounding of 17 rows in place of 50 does that to a sample. The model is smooth.
WORDS = [
    *("digits", "model.name=user_code:smooth", "train.epochs=1.01", "data.global_batch=50"),
    *("log.every=1", "optim.clip_norm=1"),
]
TOLERANCE = 1e-6  # relative, of losses; fp32 sums in another order
# Absolute. Gradients of about 1e-3 differ by 2^-22 of that, as measured. AdamW divides a gradient
# by its own size plus 1e-8, so where it is nearly zero the update differs by a fraction of
# 2^-22 * 1e-3 / 1e-8 = 0.024. An update is at most 3e-3.
WEIGHTS_TOLERANCE = 0.024 * 3e-3


def result(root: Path, world_size: int, *more: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    words = [*WORDS, f"run.root={root}", "run.name=equal", *more]
    train(world_size, words, root / "logs")
    run_dir = RunDir(root, "equal")
    losses = [line["loss"] for line in logged_steps(run_dir)]
    losses += [
        line[key]
        for line in read_lines(run_dir.events)
        if line["event"] == "evaluated"
        for key in ("loss", "accuracy")
    ]
    newest = max(run_dir.checkpoints.iterdir())
    return losses, export.read(newest)["model"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    return result(tmp_path_factory.mktemp("alone"), 1, "parallel.strategy=single")


@pytest.mark.parametrize(
    ("world_size", "more"),
    [(1, ()), (2, ("data.micro_batch=7",)), (3, ()), (4, ("data.micro_batch=5",))],
)
def test_ddp_equals_one_process(
    tmp_path: Path,
    alone: tuple[list[float], dict[str, torch.Tensor]],
    world_size: int,
    more: tuple[str, ...],
) -> None:
    losses, weights = result(tmp_path, world_size, *more)
    assert len(losses) == math.ceil(1437 * 1.01 / 50) + 2
    assert losses == pytest.approx(alone[0], rel=TOLERANCE)
    assert weights.keys() == alone[1].keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, alone[1][name], rtol=0, atol=WEIGHTS_TOLERANCE)


@pytest.mark.long
def test_resume_at_another_world_size(tmp_path: Path) -> None:
    words = ["optim.schedule=constant", "train.steps=30"]
    whole, _ = result(tmp_path / "whole", 1, *words)
    result(tmp_path, 4, *words, "train.steps=15")
    resumed, _ = result(tmp_path, 2, *words)
    assert resumed[:30] == pytest.approx(whole[:30], rel=TOLERANCE)


def test_bf16_stays_close(tmp_path: Path) -> None:
    """The bound is loose: bf16 keeps 8 bits of each number in forward and backward."""
    fp32, _ = result(tmp_path / "fp32", 1)
    bf16, _ = result(tmp_path / "bf16", 2, "precision=bf16")
    assert bf16 != fp32
    assert bf16[:10] == pytest.approx(fp32[:10], rel=0.03)
