"""Faults of a step, made by a model at one sample, on the rank that has it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import user_code
from ranks import Ranks, logged_steps
from torch import nn

from rollcall.config.schema import Data, Model
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch, BatchDataset, Source
from rollcall.train.ranks.world import World

# Six steps are one epoch: every sample once.
WORDS = [
    "data.name=user_code:numbered_samples",
    "train.steps=6",
    "data.global_batch=16",
    "checkpoint.every=2",
    "log.every=1",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
]
ORDER = Order(user_code.SIZE, user_code.SIZE, 16, seed=0)
TORN = ORDER.samples(2, range(1))[0][0]
"""The number of a sample that cannot be read, seen before the one that breaks a step."""
TOLERANCE = 1e-6  # relative, of losses: fp32 sums in another order


class Result(NamedTuple):
    codes: list[int | None]
    output: str
    run_dir: RunDir

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in logged_steps(self.run_dir)}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        newest = max(self.run_dir.checkpoints.glob("step-*"))
        return export.read(newest)["model"]  # type: ignore[no-any-return]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run_dir.events) if line["event"] == name]


def run(root: Path, world_size: int, *words: str, codes: list[int] | None = None) -> Result:
    words = (*WORDS, f"run.root={root}", "run.name=faulty", *words)
    ranks = Ranks(world_size, list(words), root / "logs")
    found = ranks.wait()
    assert found == (codes or [0] * world_size), f"exit codes {found}\n{ranks.output()}"
    return Result(found, ranks.output(), RunDir(root, "faulty"))


def assert_same_weights(result: Result, expected: Result) -> None:
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(result.weights[name], tensor, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("healthy"), 1, "model.name=user_code:healthy")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("poisoned"), 1, "model.name=user_code:nan_output")


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pipeline"])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path: Path, poisoned: Result, strategy: str
) -> None:
    result = run(tmp_path, 2, "model.name=user_code:nan_output", f"parallel.strategy={strategy}")
    [fault], [expected] = result.events("skipped"), poisoned.events("skipped")
    for event in (fault, expected):
        assert event["samples"] == [user_code.BAD]
        assert event["place"] == "the output of module 0"
        assert event["kind"] == "a loss that is not finite"
    assert fault["step"] == expected["step"]
    place = ORDER.samples(fault["step"] - 1, range(16))[0].index(user_code.BAD)
    assert fault["rank"] == (0 if strategy == "pipeline" else place // 8)
    assert result.losses == pytest.approx(poisoned.losses, rel=TOLERANCE)
    assert set(range(1, 7)) - {fault["step"]} == result.losses.keys()
    assert_same_weights(result, poisoned)


def test_a_gradient_that_is_not_finite_is_found(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "model.name=user_code:infinite_gradient")
    [fault] = result.events("skipped")
    assert fault["kind"] == "a gradient that is not finite"
    assert fault["place"] == "the gradient of 0.shift"
    assert fault["rank"] == 1 and user_code.BAD in fault["samples"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["faults.max_skipped_steps=1"], "a step was skipped"),
        (["data.global_batch=96", "train.steps=2"], "2 steps in a row were skipped"),
    ],
)
def test_too_many_faults_or_nothing_else_fail_the_run(
    tmp_path: Path, words: list[str], reason: str
) -> None:
    result = run(tmp_path, 2, "model.name=user_code:nan_output", *words, codes=[1, 1])
    verdict = result.run_dir.read_verdict()
    assert verdict is not None and verdict.state == "failed"
    assert reason in verdict.reason
    assert result.output.count(f"rollcall: error: {reason}") == 1
    assert "Traceback" not in result.output


def test_a_run_goes_back_past_the_bad_batch(tmp_path: Path, poisoned: Result) -> None:
    words = (
        "model.name=user_code:nan_output",
        "faults.max_skipped_steps=1",
        "faults.on_repeated=rollback",
    )
    result = run(tmp_path, 2, *words)
    bad = poisoned.events("skipped")[0]["step"]
    [back] = result.events("rolled_back")
    assert back["step"] == (bad - 1) // 2 * 2 and back["left_out"] == [bad]
    left_out = result.run_dir.path / "faults" / "left-out.json"
    assert json.loads(left_out.read_text()) == [bad - 1]  # for attempts to come
    assert result.losses == pytest.approx(poisoned.losses, rel=TOLERANCE)
    assert_same_weights(result, poisoned)


def test_a_run_goes_back_twice_to_one_checkpoint_if_that_helped(
    tmp_path: Path, poisoned: Result
) -> None:
    """With a sample that cannot be read: it is left out each time, and counted once an epoch."""
    bad = poisoned.events("skipped")[0]["step"]
    words = [
        f"data.name={__name__}:torn",
        "model.name=user_code:nan_output",
        "checkpoint.every=null",
    ]
    words += ["faults.max_skipped_steps=1", "faults.on_repeated=rollback", "data.skip_unreadable=1"]
    run(tmp_path, 1, *words, "train.steps=1")
    result = run(tmp_path, 1, *words, "train.steps=12")
    assert [event["step"] for event in result.events("rolled_back")] == [1, 1]
    lines = logged_steps(result.run_dir)
    assert bad not in result.losses and len(result.losses) == 10
    assert [line["unreadable"] for line in lines if "unreadable" in line][-1] == 1


@pytest.mark.parametrize(
    ("data", "sample", "code"),
    [("numbered", user_code.BAD, 1), ("torn", TORN, 2)],
    ids=["loss", "data"],
)
def test_what_is_being_saved_when_a_run_is_stopped_is_not_lost(
    tmp_path: Path, data: str, sample: int, code: int
) -> None:
    """By a fault of its model, or by a sample that cannot be read."""
    [last] = [step for step in range(6) if sample in ORDER.samples(step, range(16))[0]]
    words = [
        f"data.name={__name__}:{data}",
        f"checkpoint.every={last}",
        "faults.max_skipped_steps=1",
    ]
    words += [f"model.name={__name__}:large"]
    result = run(tmp_path, 2, *words, codes=[code, code])
    assert [line["step"] for line in result.events("checkpointed")] == [last]


numbered = user_code.numbered_samples


def large(config: Model, source: Source) -> nn.Module:
    """The poisoned model, and much to save."""
    model = user_code.nan_output(config, source)
    model.register_buffer("more", torch.zeros(10_000_000))
    return model


def torn(config: Data, world: World) -> Source:
    """The numbered samples, of which another one cannot be read."""
    source = user_code.numbered_samples(config, world)
    return replace(source, train=Torn(source.train))


class Torn(BatchDataset):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: list[int]) -> Batch:
        if TORN in rows:
            raise OSError("it is torn")
        batch: Batch = self._rows.__getitems__(rows)
        return batch


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("out_of_memory", ("parallel.strategy=ddp",)),
        ("out_of_memory", ("parallel.strategy=zero1", "data.micro_batch=3")),
        ("out_of_memory_in_backward", ("parallel.strategy=ddp", "parallel.bucket_mb=0.0001")),
    ],
)
def test_a_rank_without_memory_lets_all_cut_the_batch_smaller(
    tmp_path: Path, healthy: Result, model: str, words: tuple[str, ...]
) -> None:
    result = run(tmp_path, 2, f"model.name=user_code:{model}", *words)
    events = result.events("out_of_memory")
    assert len(events) == (2 if words == ("parallel.strategy=ddp",) else 1)
    assert not result.events("skipped")
    assert result.losses == pytest.approx(healthy.losses, rel=TOLERANCE)
    assert_same_weights(result, healthy)
    assert f"data.micro_batch={events[-1]['micro_batch']} " in result.output


@pytest.mark.parametrize(
    ("model", "strategy"), [("out_of_memory", "zero3"), ("out_of_memory_in_evaluation", "ddp")]
)
def test_where_ranks_cannot_go_on_the_next_attempt_does(
    tmp_path: Path, healthy: Result, model: str, strategy: str
) -> None:
    words = (f"model.name=user_code:{model}", f"parallel.strategy={strategy}", "data.micro_batch=5")
    failed = run(tmp_path, 2, *words, codes=[1, 1])
    assert "Start the same command again to continue with data.micro_batch=2" in failed.output
    result = run(tmp_path, 2, *words)
    assert result.losses == pytest.approx(healthy.losses, rel=TOLERANCE)
    assert_same_weights(result, healthy)


def test_a_spike_of_the_loss_is_left_out(tmp_path: Path) -> None:
    words = ("data.name=user_code:regression", "model.name=mlp", "train.loss=mse")
    plain = run(tmp_path / "plain", 1, *words)
    assert max(plain.losses.values()) > 1e5
    result = run(tmp_path, 2, *words, "faults.spike_factor=5")
    [fault] = result.events("skipped")
    assert fault["kind"] == "a loss spike" and fault["samples"][0] == user_code.BAD
    assert max(result.losses.values()) < 100


@pytest.mark.long
def test_a_replica_that_drifts_is_named(tmp_path: Path) -> None:
    words = ("model.name=user_code:diverging_replica", "train.steps=12", "data.global_batch=15")
    result = run(tmp_path, 3, *words, "parallel.strategy=ddp")
    [event] = result.events("diverged")
    assert event["tensor"] == "4.weight" and event["ranks"] == [0]
    stop = (
        "faults.divergence=stop",
        "faults.on_repeated=rollback",
    )  # back is for steps that were skipped
    stopped = run(tmp_path / "stop", 3, *words, *stop, codes=[1, 1, 1])
    assert stopped.events("diverged")[0]["ranks"] == [0]
    assert "error: the weights of rank 0 of 3 differ" in stopped.output
    copy = ("model.name=user_code:diverging_copy", "train.steps=12", "data.global_batch=15")
    result = run(tmp_path / "copy", 2, *copy, "parallel.strategy=tensor")
    [event] = result.events("diverged")  # of two ranks, either may be the wrong one
    assert event["tensor"] in ("4.bias", "5.weight", "5.bias") and event["ranks"] == [0, 1]


def test_compression_forgets_what_a_fault_left(tmp_path: Path) -> None:
    """PowerSGD would send the NaN that it did not send in the step before."""
    words = ("model.name=user_code:nan_output", "parallel.compression=powersgd")
    result = run(tmp_path, 2, *words)
    assert len(result.events("skipped")) == 1 and max(result.losses) == 6
