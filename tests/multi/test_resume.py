"""A run that was interrupted continues as if it had not been."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import Ranks, train

from train.run import RunDir, read_lines

WORDS = [
    "digits",
    "train.steps=60",
    "train.evaluate_every=null",
    "checkpoint.every=7",
    "log.every=1",
    "model.dropout=0.2",
    "data.global_batch=50",
    "data.micro_batch=9",
]


def losses(run_dir: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run_dir.metrics)}


def words(root: Path, name: str) -> list[str]:
    return [*WORDS, f"run.root={root}", f"run.name={name}"]


def wait_for_step(run_dir: RunDir, step: int) -> None:
    deadline = time.monotonic() + 60
    while max(losses(run_dir), default=0) < step or not any(run_dir.checkpoints.glob("step-*")):
        assert time.monotonic() < deadline, f"step {step} was not reached, or nothing was saved"
        time.sleep(0.01)


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
    for step in (10, 30):
        ranks = Ranks(4, words(tmp_path, "killed"), tmp_path / "logs")
        wait_for_step(run_dir, step)
        ranks.kill()
        assert run_dir.read_verdict() is None
    train(4, words(tmp_path, "killed"), tmp_path / "logs")
    resumed = [line["step"] for line in read_lines(run_dir.events) if line["event"] == "resumed"]
    assert len(resumed) == 2 and all(step % 7 == 0 for step in resumed)
    assert losses(run_dir) == uninterrupted


def test_signal_to_one_rank_stops_all_and_loses_no_step(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    run_dir = RunDir(tmp_path, "stopped")
    ranks = Ranks(4, words(tmp_path, "stopped"), tmp_path / "logs")
    wait_for_step(run_dir, 10)
    pid = ranks.processes[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert ranks.wait() == [os.EX_TEMPFAIL] * 4
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "requeue"
    assert (run_dir.checkpoints / f"step-{verdict.step:08d}").exists()
    train(4, words(tmp_path, "stopped"), tmp_path / "logs")
    verdict = run_dir.read_verdict()
    assert verdict is not None and (verdict.state, verdict.step) == ("done", 60)
    assert losses(run_dir) == uninterrupted
