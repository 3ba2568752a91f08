"""Exact mode: the same weights on any number of ranks, and after a stop and a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from checkout import SHORT_TEXT
from disks import until
from ranks import Ranks, logged_steps, train
from torch import nn

from rollcall.config import ConfigError, parse
from rollcall.config.schema import Model
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export
from rollcall.train.data.source import Source
from rollcall.train.exact import fingerprint
from rollcall.train.exact.strategy import Tree

# 1,437 samples in batches of 50: 8 virtual shards of 7 rows, the last one nearly empty, and a last
# batch of 2 samples.
DIGITS = ["digits", "exact=true", "train.epochs=1.01", "data.global_batch=50", "model.dropout=0.2"]
DIGITS += ["optim.clip_norm=1", "checkpoint.every=7", "log.every=1"]
GPT = ["gpt", "exact=true", "train.steps=4", "data.seq_len=32", "model.dropout=0.1"]
GPT += [SHORT_TEXT, "model.hidden_size=32", "model.num_layers=2", "data.global_batch=20"]


def results(run_dir: RunDir) -> tuple[str, float, float, list[float]]:
    """Return the hash of the weights, validation loss and accuracy, and the losses of all steps."""
    events = {line["event"]: line for line in read_lines(run_dir.events)}
    losses = [line["loss"] for line in logged_steps(run_dir)]
    evaluated = events["evaluated"]
    return events["finished"]["weights"], evaluated["loss"], evaluated["accuracy"], losses


def run(root: Path, world_size: int, words: list[str]) -> tuple[str, float, float, list[float]]:
    run_dir = RunDir(root, f"{words[0]}-{world_size}")
    output = train(
        world_size, [*words, f"run.root={root}", f"run.name={run_dir.name}"], root / run_dir.name
    )
    found = results(run_dir)
    assert found[0][:16] in output
    return found


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float, float, list[float]]:
    return run(tmp_path_factory.mktemp("one-rank"), 1, DIGITS)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_equal_on_any_number_of_ranks(
    tmp_path: Path, one_rank: tuple[str, float, float, list[float]], world_size: int
) -> None:
    """With an incomplete last batch, dropout and clipping, all results have the same bits."""
    assert run(tmp_path, world_size, DIGITS) == one_rank


def test_a_step_changes_only_the_weights_that_it_uses(tmp_path: Path) -> None:
    words = ["digits", "model.name=user_code:sometimes", "data.global_batch=4", "train.steps=9"]
    words += ["log.every=1", "optim.warmup_steps=0", "optim.lr=0.03", f"run.root={tmp_path}"]
    losses = {}
    for world_size, exact in ((1, False), (2, True)):
        more = [f"exact={exact}".lower(), f"run.name=of-{world_size}"]
        train(world_size, [*words, *more], tmp_path / f"logs-{world_size}")
        found = logged_steps(RunDir(tmp_path, f"of-{world_size}"))
        losses[exact] = [line["loss"] for line in found]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


@pytest.mark.long
def test_a_transformer_is_equal_on_four_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, 4, GPT) == run(tmp_path, 1, GPT)


def test_stopped_on_four_ranks_and_resumed_on_one(
    tmp_path: Path, one_rank: tuple[str, float, float, list[float]]
) -> None:
    run_dir, gate = RunDir(tmp_path, "moved"), tmp_path / "gate"
    words = [*DIGITS, "model.name=user_code:gated", f"run.root={tmp_path}", "run.name=moved"]
    # A step has two forward passes per rank: the gate stops them in step 20 of 30 at the latest.
    ranks = Ranks(4, words, tmp_path / "logs", {"GATE": f"40:300:{gate}"})
    until(lambda: len(logged_steps(run_dir)) >= 10)
    os.kill(ranks.processes[1].pid or 0, signal.SIGTERM)
    gate.touch()
    assert ranks.wait() == [os.EX_TEMPFAIL] * 4
    train(1, words, tmp_path / "logs")
    assert results(run_dir) == one_rank
    newest = max(run_dir.checkpoints.iterdir())
    assert fingerprint.of(export.read(newest)["model"]) == one_rank[0]


def with_batch_norm(_: Model, source: Source) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, source.classes))


@pytest.mark.parametrize(
    ("world_size", "words", "expected"),
    [
        (3, [], "exact=true needs 1, 2, 4 or 8 ranks, but 3 were started"),
        (4, ["exact_shards=2"], "needs 1 or 2 ranks"),
        (1, [f"model.name={__name__}:with_batch_norm"], "does not work with layer 1 of the model"),
    ],
)
def test_unsuitable_ranks_and_models_are_refused(
    tmp_path: Path, world_size: int, words: list[str], expected: str
) -> None:
    words = [*DIGITS, *words, f"run.root={tmp_path}/runs"]
    ranks = Ranks(world_size, words, tmp_path)
    assert ranks.wait() == [2] * world_size
    assert expected in ranks.output()
    assert len(ranks.output().splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["parallel.strategy=zero3"], "choose parallel.strategy=ddp or single"),
        (["parallel.mesh=tensor=2"], "does not work with parallel.mesh=tensor=2"),
        (["parallel.compression=fp16"], "parallel.compression is an option of"),
        (["data.micro_batch=3"], "increase exact_shards"),
        (["exact=false", "log.fingerprints=true"], "set exact=true, or remove the key"),
    ],
)
def test_conflicting_options_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse([*DIGITS, *words])


def test_sums_of_parts_and_of_the_whole_have_the_same_bits() -> None:
    leaves = list(torch.rand(8, 1000))

    def add(terms: list[torch.Tensor]) -> torch.Tensor:
        tree = Tree()
        for term in terms:
            tree.add([term])
        return tree.sum()[0]

    pairs = [add(leaves[2 * rank : 2 * rank + 2]) for rank in range(4)]
    assert torch.equal(add(leaves), add(pairs))
    assert not torch.equal(add(leaves), torch.stack(leaves).sum(0))
