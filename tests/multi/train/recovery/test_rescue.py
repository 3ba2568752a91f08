"""A rank is lost: the others save the newest step, and no step is repeated."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from checkpoint_differences import differences
from disks import until
from ranks import Ranks, logged_steps

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.tools import verify

WORDS = ["digits", "optim.schedule=constant", "log.every=1", "device=cpu", "checkpoint.every=null"]
WORDS += ["train.evaluate_every=null", "data.global_batch=48"]


def start(root: Path, ranks: int, *words: str) -> Ranks:
    return Ranks(ranks, [*WORDS, f"run.root={root}", *words], root / "logs")


def finish(root: Path, name: str, ranks: int, steps: int, *words: str) -> Path:
    started = start(root, ranks, *words, f"run.name={name}", f"train.steps={steps}")
    codes = started.wait()
    assert codes == [0] * ranks, started.output()
    return layout.path_of(RunDir(root, name).checkpoints, steps)


def lose(root: Path, rank: int, ranks: int, *words: str) -> int | None:
    """Kill a rank for which the others wait; return the newest step that was saved."""
    run_dir = RunDir(root, "lost")
    training = start(root, ranks, *words, "run.name=lost", "train.steps=1000000")
    try:
        until(lambda: run_dir.metrics.exists() and len(logged_steps(run_dir)) > 5)
        os.kill(training.processes[rank].pid or 0, signal.SIGSTOP)
        time.sleep(0.5)  # until the others wait
        training.processes[rank].kill()
        codes = training.wait()
    finally:
        training.kill()
    assert codes.pop(rank) == -signal.SIGKILL and 0 not in codes, training.output()
    return max(layout.published(run_dir.checkpoints), default=None)


WATCHED = ["optim.ema=0.9", "optim.evaluate_ema=true", "train.evaluate_every=0.01"]
WATCHED += ["faults.spike_factor=50"]
SPREAD = {
    "ddp": (3, 1, ["model.name=user_code:with_batchnorm", "data.micro_batch=7", *WATCHED]),
    "ddp without rank 0": (2, 0, []),
    "zero2, replicas of shards": (4, 3, ["parallel.mesh=replicate=2,shard=2"]),
    "pipelines": (4, 2, ["parallel.mesh=replicate=2,pipeline=2", "model.name=mlp"]),
    "tensor": (4, 0, ["parallel.mesh=replicate=2,tensor=2", "model.name=mlp"]),
    "exact": (2, 1, ["exact=true"]),
}


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in [*SPREAD][1:])]
)
def test_no_step_is_repeated(tmp_path: Path, name: str) -> None:
    ranks, rank, words = SPREAD[name]
    step = lose(tmp_path, rank, ranks, *words)
    assert step is not None and step >= 5
    rescued = layout.path_of(RunDir(tmp_path, "lost").checkpoints, step)
    assert not verify.problems(rescued)
    assert not [path for path in rescued.iterdir() if path.suffix not in (".bin", ".json")]
    last = finish(tmp_path, "lost", ranks, step + 4, *words)
    resumed = [
        line for line in read_lines(RunDir(tmp_path, "lost").events) if line["event"] == "resumed"
    ]
    assert [line["step"] for line in resumed] == [step]
    undisturbed = finish(tmp_path, "undisturbed", ranks, step + 4, *words)
    evaluations = [  # the one that the loss has cut off, too
        [line["step"] for line in RunDir(tmp_path, name).read_events("evaluated")]
        for name in ("lost", "undisturbed")
    ]
    assert evaluations[0] == evaluations[1]
    assert not differences(last, undisturbed)


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.strategy=zero3"],
        pytest.param(["parallel.strategy=zero1"], marks=pytest.mark.long),
        ["train.callbacks=user_state:Counting"],
    ],
    ids=["its shard", "its state of the optimizer", "a callback that follows late"],
)
def test_nothing_is_saved_that_would_not_be_whole(tmp_path: Path, words: list[str]) -> None:
    assert lose(tmp_path, 1, 2, *words) is None
    assert not [*RunDir(tmp_path, "lost").checkpoints.glob(".*")]
