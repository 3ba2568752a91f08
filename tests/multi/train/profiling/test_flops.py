"""Runs log the throughput of dictionaries, packed rows, masks and losses of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_state
from ranks import logged_steps, train
from user_state import WORDS

from rollcall.records.run_dir import RunDir

ROWS, LENGTH, TABLE, WIDTH = 12, 7, 11, 6
TOKENS = ["data.name=user_state:tokens", "model.name=user_state:Masked"]


@pytest.mark.parametrize(
    "words",
    [
        ["data.pad=7", "train.loss=next_token", "data.micro_batch=4"],
        ["data.pad=7", "train.loss=user_state:of_tokens"],
        ["data.pack=7", "train.loss=next_token", "parallel.check=off"],
    ],
)
def test_masked_dictionaries_have_all_figures(tmp_path: Path, words: list[str]) -> None:
    more = ["train.steps=1", f"run.root={tmp_path}", "run.name=x"]
    train(1, [*WORDS, *TOKENS, *words, *more], tmp_path)
    [line] = logged_steps(RunDir(tmp_path, "x"))
    rate = line["samples_per_second"]
    assert line["tokens_per_second"] == pytest.approx(LENGTH * rate, rel=0.01)
    per_token = 3 * 2 * WIDTH * TABLE
    assert line["flops_per_second"] == pytest.approx(LENGTH * per_token * rate, rel=0.01)


@pytest.mark.parametrize("size", [12, 4])
def test_what_a_pass_computes_once_counts_once(tmp_path: Path, size: int) -> None:
    """The weights are multiplied with each other once for each micro-batch."""
    words = ["model.name=user_state:Squared", "train.loss=user_state:cross_entropy"]
    more = ["train.steps=1", f"run.root={tmp_path}", "run.name=x", f"data.micro_batch={size}"]
    train(1, [*WORDS, *words, *more], tmp_path)
    [line] = logged_steps(RunDir(tmp_path, "x"))
    each = 2 * 2 * user_state.WIDTH * 5  # its input needs no gradient
    alone = 3 * 2 * user_state.WIDTH**2 * 5
    expected = each + alone / size
    ratio = line["flops_per_second"] / line["samples_per_second"]
    assert ratio == pytest.approx(expected, rel=0.01)
