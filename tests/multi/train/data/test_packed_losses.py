"""A model that computes its own loss trains on packed rows as one that leaves it to rollcall."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, logged_steps, train

from rollcall.records.run_dir import RunDir

WORDS = ["device=cpu", "data.name=user_tasks:words", "data.pack=24", "data.global_batch=6"]
WORDS += ["model.name=user_tasks:Packed", "train.steps=3", "log.every=1", "optim.warmup_steps=0"]
OF_MODEL = ["train.loss=model", "train.loss_args.counts=labels"]


def test_each_label_counts_once_in_any_cut(tmp_path: Path) -> None:
    words = [*WORDS, f"run.root={tmp_path}"]
    train(1, [*words, "run.name=alone", "train.loss=cross_entropy"], tmp_path / "alone-logs")
    cut = ["run.name=cut", "data.micro_batch=1", "parallel.strategy=zero3"]
    train(2, [*words, *OF_MODEL, *cut], tmp_path / "cut-logs")
    alone, both = (
        [line["loss"] for line in logged_steps(RunDir(tmp_path, name))] for name in ("alone", "cut")
    )
    assert len(alone) == 3
    assert both == pytest.approx(alone, rel=1e-6)


def test_a_loss_of_the_next_labels_does_not_count_all(tmp_path: Path) -> None:
    words = [*WORDS, *OF_MODEL, "model.args.shifts=true", f"run.root={tmp_path}"]
    run = Ranks(2, words, tmp_path / "logs")
    assert run.wait() == [2, 2], run.output()
    text = "rollcall: error: train.loss_args.counts=labels: the model's .loss is another mean"
    assert run.output().count(text) == 1
