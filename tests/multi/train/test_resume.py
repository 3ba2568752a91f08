"""A run that was interrupted continues as if it had not been."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from disks import until
from ranks import Ranks, logged_steps, train
from torch import nn

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout

WORDS = [
    "digits",
    "model.name=user_code:gated_and_noisy",
    "train.steps=60",
    "train.evaluate_every=null",
    "checkpoint.every=7",
    "log.every=1",
    "model.dropout=0.2",
    "data.global_batch=50",
    "data.micro_batch=9",
]


def losses(run_dir: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged_steps(run_dir)}


def words(root: Path, name: str) -> list[str]:
    return [*WORDS, f"run.root={root}", f"run.name={name}"]


def start(root: Path, name: str, first: int) -> Ranks:
    """Start a run again after `first` steps, and let it do ten more and save."""
    # A step has two forward passes on each rank: 20 steps later they wait for the file `gate`.
    ranks = Ranks(4, words(root, name), root / "logs", {"GATE": f"40:300:{root / 'gate'}"})
    run_dir = RunDir(root, name)
    until(lambda: max(losses(run_dir), default=0) >= first + 10)
    until(lambda: max(layout.published(run_dir.checkpoints), default=0) > first)
    return ranks


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    root = tmp_path_factory.mktemp("uninterrupted")
    train(4, words(root, "whole"), root / "logs")
    result = losses(RunDir(root, "whole"))
    assert sorted(result) == list(range(1, 61))
    return result


def test_killed_run_resumes_to_identical_losses(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    run_dir = RunDir(tmp_path, "killed")
    for _ in range(2):
        start(tmp_path, "killed", max(layout.published(run_dir.checkpoints), default=0)).kill()
        assert run_dir.read_verdict() is None
    train(4, words(tmp_path, "killed"), tmp_path / "logs")
    resumed = [line["step"] for line in read_lines(run_dir.events) if line["event"] == "resumed"]
    assert len(resumed) == 2 and all(step % 7 == 0 for step in resumed)
    assert losses(run_dir) == uninterrupted


def test_signal_to_one_rank_stops_all_and_loses_no_step(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    run_dir = RunDir(tmp_path, "stopped")
    ranks = start(tmp_path, "stopped", 0)
    pid = ranks.processes[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert ranks.wait() == [os.EX_TEMPFAIL] * 4
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "requeue"
    assert (run_dir.checkpoints / f"step-{verdict.step:08d}").exists()
    train(4, words(tmp_path, "stopped"), tmp_path / "logs")
    verdict = run_dir.read_verdict()
    assert verdict is not None and (verdict.state, verdict.step) == ("done", 60)
    assert losses(run_dir) == uninterrupted


class Unused(nn.Module):
    """A model with a layer that no loss depends on, so that its optimizer state stays empty."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_run_with_an_unused_parameter_resumes(tmp_path: Path) -> None:
    own = ["digits", f"model.name={__name__}:Unused", "device=cpu", "log.every=1"]

    def run(name: str, ranks: int, strategy: str, steps: int) -> dict[int, float]:
        words = [*own, f"parallel.strategy={strategy}", f"train.steps={steps}"]
        train(ranks, [*words, f"run.root={tmp_path}", f"run.name={name}"], tmp_path / "logs")
        return losses(RunDir(tmp_path, name))

    run("a", 2, "zero3", 3)
    run("a", 1, "single", 5)
    assert run("a", 2, "zero2", 8) == pytest.approx(run("b", 1, "single", 8), rel=1e-5)
    run("b", 1, "single", 6)
    verdict = RunDir(tmp_path, "b").read_verdict()
    assert verdict is not None and "already past the 6 that were asked for" in verdict.reason
