"""Exact mode: one hash of the weights, for any number of ranks, through a stop and a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from disks import until
from ranks import Ranks, train
from torch import nn

from train import config
from train.config import ConfigError
from train.data.source import Source
from train.parallel.exact import Tree
from train.proof import fingerprint
from train.run import RunDir, read_lines
from train.schema import Model

# 1,437 samples in batches of 50: 8 virtual shards of 7 rows, the last of them nearly empty, and a
# last batch of 2 samples.
DIGITS = ["digits", "exact=true", "train.epochs=1.01", "data.global_batch=50", "model.dropout=0.2"]
DIGITS += ["optim.clip_norm=1", "checkpoint.every=7", "log.every=1"]
GPT = ["gpt", "exact=true", "train.steps=4", "data.context=32", "model.dropout=0.1"]
GPT += ["model.hidden=32", "model.layers=2", "data.global_batch=20"]


def results(run_dir: RunDir) -> tuple[str, float, float, list[float]]:
    """Hash of the weights, loss and accuracy of the evaluation, the losses of the steps."""
    events = {line["event"]: line for line in read_lines(run_dir.events)}
    losses = [line["loss"] for line in read_lines(run_dir.metrics)]
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
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float, float, list[float]]:
    return run(tmp_path_factory.mktemp("alone"), 1, DIGITS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_on_any_number_of_ranks(
    tmp_path: Path, alone: tuple[str, float, float, list[float]], world_size: int
) -> None:
    """An uneven last batch, dropout, clipping: all results are equal, not only close."""
    assert run(tmp_path, world_size, DIGITS) == alone


def test_a_transformer_is_equal(tmp_path: Path) -> None:
    assert run(tmp_path, 4, GPT) == run(tmp_path, 1, GPT)


def test_stopped_on_four_ranks_and_resumed_on_one(
    tmp_path: Path, alone: tuple[str, float, float, list[float]]
) -> None:
    run_dir, gate = RunDir(tmp_path, "moved"), tmp_path / "gate"
    words = [*DIGITS, "model.name=own:gated", f"run.root={tmp_path}", "run.name=moved"]
    # A step has two passes on each rank: they wait at the latest in step 20 of 30.
    ranks = Ranks(4, words, tmp_path / "logs", {"GATE": f"40:300:{gate}"})
    until(lambda: len(list(read_lines(run_dir.metrics))) >= 10)
    os.kill(ranks.processes[1].pid or 0, signal.SIGTERM)
    gate.touch()
    assert ranks.wait() == [os.EX_TEMPFAIL] * 4
    train(1, words, tmp_path / "logs")
    assert results(run_dir) == alone
    newest = max(run_dir.checkpoints.iterdir())
    assert fingerprint.of_checkpoint(newest) == alone[0]


def with_batch_norm(_: Model, source: Source) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, source.classes))


@pytest.mark.parametrize(
    ("world_size", "words", "expected"),
    [
        (3, [], "exact=true works on 1, 2, 4 or 8 ranks, but 3 were started"),
        (4, ["exact_shards=2"], "works on 1 or 2 ranks"),
        (1, ["model.name=test_exact:with_batch_norm"], "layer 1 of the model equal"),
    ],
)
def test_what_cannot_be_kept_equal_is_refused(
    tmp_path: Path, world_size: int, words: list[str], expected: str
) -> None:
    words = [*DIGITS, *words, f"run.root={tmp_path}/runs"]
    ranks = Ranks(world_size, words, tmp_path, env={"PYTHONPATH": str(Path(__file__).parent)})
    assert ranks.wait() == [2] * world_size
    assert expected in ranks.output()
    assert len(ranks.output().splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["parallel.strategy=zero3"], "choose parallel.strategy=ddp or single"),
        (["parallel.mesh=tensor=2"], "cannot do so with parallel.mesh=tensor=2"),
        (["parallel.compression=fp16"], "parallel.compression is an option of"),
        (["data.micro_batch=3"], "raise exact_shards"),
        (["exact=false", "log.fingerprints=true"], "add exact=true, or leave it out"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config.parse([*DIGITS, *words])


def test_the_tree_of_parts_is_the_tree_of_the_whole() -> None:
    leaves = list(torch.rand(8, 1000))

    def add(terms: list[torch.Tensor]) -> torch.Tensor:
        tree = Tree()
        for term in terms:
            tree.add([term])
        return tree.sum()[0]

    pairs = [add(leaves[2 * rank : 2 * rank + 2]) for rank in range(4)]
    assert torch.equal(add(leaves), add(pairs))
    assert not torch.equal(add(leaves), torch.stack(leaves).sum(0))
