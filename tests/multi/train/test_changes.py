"""A run that is resumed with other values says so, or is refused and stays unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks, train
from torch import nn

from rollcall.config.schema import Model
from rollcall.records.run_dir import RunDir
from rollcall.train.data.source import Source

WORDS = ["digits", "device=cpu", "model.name=mlp", "checkpoint.every=5", "optim.clip_norm=0.5"]
TOLD = "continues with other values"


def words(root: Path, *more: str) -> list[str]:
    return [*WORDS, f"run.root={root}", "run.name=a", *more]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changes")
    train(1, words(root, "train.steps=10"), root / "first")
    return root


def test_a_refused_change_leaves_the_run_as_it_was(root: Path) -> None:
    run = RunDir(root, "a")
    config, verdict = run.config.read_text(), run.read_verdict()
    assert verdict and verdict.state == "done"
    changed = ["seed=5", "data.global_batch=32", "train.steps=20"]
    ranks = Ranks(2, words(root, *changed), root / "refused")
    assert ranks.wait() == [2, 2]
    assert ranks.output().count("seed 0 -> 5, data.global_batch 64 -> 32. They change") == 1
    assert "run.allow_changes=seed,data.global_batch" in ranks.output()
    assert run.config.read_text() == config
    assert run.read_verdict() == verdict

    other = Ranks(1, words(root, "model.hidden_size=9"), root / "other")  # does not fit
    assert other.wait() == [2]
    assert run.config.read_text() == config
    assert run.read_verdict() == verdict


def test_changes_are_said_once_and_recorded(root: Path) -> None:
    silent = ["train.steps=15", "data.micro_batch=8", "data.num_workers=1", "log.every=2"]
    silent += ["parallel.strategy=zero3", "checkpoint.keep_last=3", "checkpoint.every=3"]
    text = train(2, words(root, *silent), root / "silent")
    assert f"{TOLD}: train.steps 10 -> 15" in text
    text = train(1, words(root, *silent, "parallel.strategy=ddp"), root / "same")
    assert TOLD not in text

    changed = ["train.steps=20", "optim.lr=2.0", "seed=5", "data.global_batch=32"]
    changed += ["run.allow_changes=data.global_batch, seed"]
    text = train(2, words(root, *changed), root / "told")
    line = f"{TOLD}: seed 0 -> 5, data.global_batch 64 -> 32, optim.lr 0.003 -> 2.0, "
    assert text.count(line + "train.steps 15 -> 20") == 1
    run = RunDir(root, "a")
    [first, last] = run.read_events("changed")
    assert first["changes"] == {"train.steps": [10, 15]}
    assert (last["step"], last["changes"]["optim.lr"]) == (15, [0.003, 2.0])
    epochs = {line.step: line.more["epoch"] for line in run.read_metrics()}
    size = 1438
    assert epochs[20] == pytest.approx((15 * 64 + 5 * 32) / size, abs=1e-3)
    assert TOLD not in train(1, words(root, *changed), root / "again")


def labelled(_: Model, source: Source, labels: dict[int, str]) -> nn.Module:
    assert labels == {0: "cat"}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, source.classes))


def test_numbers_as_keys_of_arguments_are_no_change(tmp_path: Path) -> None:
    more = [f"model.name={__name__}:labelled", "model.args.labels={0: cat}"]
    first = ["digits", f"run.root={tmp_path}", "run.name=a", *more]
    for steps in (2, 3):
        ranks = Ranks(2, [*first, f"train.steps={steps}"], tmp_path / f"to-{steps}")
        assert ranks.wait() == [0, 0], ranks.output()
    assert f"{TOLD}: train.steps 2 -> 3\n" in ranks.output()
