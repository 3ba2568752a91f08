"""What stands around a step gives every strategy the result of one process."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkout import SHORT_TEXT
from ranks import Ranks, logged_steps

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export
from rollcall.train.checkpoint.tools.command import main as checkpoint
from rollcall.train.weights import stored

WORDS = [
    "digits",
    "train.steps=8",
    "optim.clip_norm=0.2",
    "data.global_batch=48",
    "checkpoint.every=4",
    "log.every=1",
]
TINY_GPT = [
    "train.steps=3",
    "data.name=text",
    SHORT_TEXT,
    "data.seq_len=32",
    "model.name=gpt",
    "model.hidden_size=32",
    "model.num_layers=2",
]
TOLERANCE = 1e-6  # relative, of losses and evaluations: fp32 sums in another order
# Relative, of losses and evaluations. e4m3 keeps 3 bits after the leading one, so it moves a weight
# by up to 2^-4 of its size, 2^-5 on average. The errors are independent, so the loss moves by about
# 2^-5 * weight (0.1) * norm of the gradient (5) = 0.016 of 5.5, and rounded activations add less.
FP8_TOLERANCE = 3 * 0.016 / 5.5


class Result(NamedTuple):
    losses: list[float]
    evaluation: float
    run_dir: RunDir
    output: str

    @property
    def state(self) -> dict[str, Any]:
        return export.read(max(self.run_dir.checkpoints.glob("step-*")))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run_dir.events) if line["event"] == name]


def run(root: Path, world_size: int, *words: str) -> Result:
    ranks = Ranks(world_size, [*WORDS, f"run.root={root}", "run.name=step", *words], root / "logs")
    codes = ranks.wait()
    assert codes == [0] * world_size, f"exit codes {codes}\n{ranks.output()}"
    run_dir = RunDir(root, "step")
    evaluated = [line for line in read_lines(run_dir.events) if line["event"] == "evaluated"]
    return Result(
        [line["loss"] for line in logged_steps(run_dir)],
        evaluated[-1]["loss"],
        run_dir,
        ranks.output(),
    )


def assert_equal(result: Result, expected: Result, tolerance: float = TOLERANCE) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=tolerance)
    assert result.evaluation == pytest.approx(expected.evaluation, rel=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("gpt"), 1, *TINY_GPT)


def test_average_of_weights_on_any_mesh(tmp_path: Path, alone: Result) -> None:
    """Sharded while it is made, saved under the weights' names, resumed on other meshes."""
    words = ("optim.ema=0.5", "optim.evaluate_ema=true", "train.evaluate_every=0.2")
    whole = run(tmp_path / "whole", 1, *words)
    assert whole.losses == alone.losses
    # Ten times what rounding may do.
    assert whole.evaluation != pytest.approx(alone.evaluation, rel=10 * TOLERANCE)
    run(tmp_path, 2, *words, "train.steps=4", "parallel.strategy=zero2")
    result = run(tmp_path, 2, *words, "parallel.strategy=pipeline")
    assert_equal(result, whole)
    average, expected = result.state["ema"], whole.state["ema"]
    assert average.keys() == result.state["model"].keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name], tensor, rtol=0, atol=1e-5)


def test_an_export_is_what_the_evaluation_used(tmp_path: Path) -> None:
    words = ("optim.ema=0.5", "optim.evaluate_ema=true", "model.name=user_code:tied")
    result = run(tmp_path, 1, *TINY_GPT, *words)
    state, run_dir = result.state, str(result.run_dir.path)
    for target in ("w.pt", "w.safetensors"):
        assert checkpoint(["export", run_dir, str(tmp_path / target), "--best"]) == 0
    for place in (run_dir, str(tmp_path / "w.pt"), str(tmp_path / "w.safetensors")):
        found = stored.open_(place)
        weights = {name: torch.empty(shape) for name, shape in found.shapes.items()}
        found.fill(weights)
        assert weights.keys() == state["model"].keys() == state["ema"].keys()
        assert all(torch.equal(weights[name], state["ema"][name]) for name in weights)
        assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    assert not torch.equal(weights["head.weight"], state["model"]["head.weight"])


def test_all_implementations_of_the_update_agree(tmp_path: Path, alone: Result) -> None:
    for name in ("single", "foreach"):
        result = run(tmp_path / name, 1, f"optim.implementation={name}")
        assert_equal(result, alone, 1e-5)
    sharded = run(tmp_path, 2, "optim.implementation=fused", "parallel.strategy=zero3")
    assert_equal(sharded, alone, 1e-5)


@pytest.mark.long
def test_norms_and_biases_need_not_decay(tmp_path: Path) -> None:
    words = ("optim.weight_decay=0.1", "optim.decay_params=matrices")
    whole = run(tmp_path / "whole", 1, *words)
    run(tmp_path, 2, *words, "train.steps=4", "parallel.strategy=zero1")
    assert_equal(run(tmp_path, 2, *words, "parallel.strategy=zero3"), whole)
    assert whole.state["optim"]["param_groups.0.bias.weight_decay"] == 0
    assert whole.state["optim"]["param_groups.0.weight.weight_decay"] == 0.1


@pytest.mark.long
def test_fp16_finds_the_same_scale_on_every_mesh(tmp_path: Path) -> None:
    """A pipeline's stages would each see another overflow; the first scales are too large."""
    words = ("precision=fp16", "train.loss=user_code:large_loss", "train.steps=12")
    whole = run(tmp_path / "whole", 1, *words)
    scale = whole.state["scaler"]["scale"]
    assert 1 < scale < 2**14
    assert len(whole.losses) + len(whole.events("overflowed")) == 12
    short = run(tmp_path, 2, *words, "train.steps=4", "parallel.strategy=zero3")
    assert "the gradients of all steps overflowed in fp16" in short.output
    result = run(tmp_path, 2, *words, "parallel.strategy=pipeline")
    assert result.state["scaler"]["scale"] == scale
    assert result.state["scaler"]["steps"] == whole.state["scaler"]["steps"]
    # 11 bits of each number, rounded in other places.
    assert_equal(result, whole, 5e-3)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("blocks", ["parallel.strategy=zero3"]),
        pytest.param("selective", ["parallel.mesh=pipeline=1,tensor=2"], marks=pytest.mark.long),
        pytest.param(
            "blocks", ["parallel.strategy=pipeline", "data.micro_batch=8"], marks=pytest.mark.long
        ),
    ],
)
def test_computing_again_changes_nothing(
    tmp_path: Path, gpt_alone: Result, mode: str, words: list[str]
) -> None:
    words = [*TINY_GPT, f"model.activation_checkpointing={mode}", *words]
    assert_equal(run(tmp_path, 2, *words), gpt_alone)


@pytest.mark.long
def test_fp8_in_shards_is_fp8_in_one(tmp_path: Path) -> None:
    # Few samples: on CPUs, torch takes a tenth of a second for a product of 1,000 rows.
    words = (*TINY_GPT, "data.global_batch=16", f"data.path={textwrap.__file__}", "data.seq_len=16")
    plain = run(tmp_path / "plain", 1, *words)
    words = (*words, "precision=fp8")
    whole = run(tmp_path / "whole", 1, *words)
    assert whole.losses != plain.losses
    assert_equal(whole, plain, FP8_TOLERANCE)
    # The largest number of a tensor sets its scale, and so how all of its numbers are rounded. One
    # process that computes the samples of one rank at a time has the same scales as two ranks.
    halves = run(tmp_path / "halves", 1, *words, "data.micro_batch=8")
    shards = run(tmp_path / "shards", 2, *words, "parallel.strategy=zero3")
    assert halves.losses != whole.losses
    # Sums in fp32 still differ in their last bits, and a number close to the middle may then round
    # the other way: by 2^-3 of its size. For one of the 256 tokens, that moves the loss by about
    # 2^-3 * weight (0.1) / 256 / 5.5 = 8.9e-6 of its size. A few numbers may do so.
    assert shards.losses == pytest.approx(halves.losses, rel=3e-5)
    # The evaluation computes more samples at once, and other ones on two ranks than on one.
    assert shards.evaluation == pytest.approx(plain.evaluation, rel=FP8_TOLERANCE)


def test_batchnorm_over_all_ranks_equals_one_process(tmp_path: Path) -> None:
    words = ("model.name=user_code:with_batchnorm", "model.sync_batchnorm=true")
    whole = run(tmp_path / "whole", 1, *words)
    for strategy in ("ddp", "zero3"):
        more = ("model.activation_checkpointing=blocks",) if strategy == "ddp" else ()
        result = run(tmp_path / strategy, 2, *words, f"parallel.strategy={strategy}", *more)
        assert "warning" not in result.output
        assert_equal(result, whole, 1e-5)
        model = result.state["model"]
        assert model["0.1.num_batches_tracked"] == 8
        torch.testing.assert_close(
            model["1.1.running_var"], whole.state["model"]["1.1.running_var"]
        )
    words = ("model.name=user_code:with_batchnorm", "checkpoint.keep_last=9")
    unsynchronized = run(tmp_path, 2, *words)
    assert "model.sync_batchnorm=true" in unsynchronized.output
    assert unsynchronized.losses != pytest.approx(whole.losses, rel=1e-4)  # ten times the above
    # Resumed from statistics that are all of one rank.
    shutil.rmtree(unsynchronized.run_dir.checkpoints / "step-00000008")
    assert run(tmp_path, 2, *words).evaluation == unsynchronized.evaluation


@pytest.mark.long
def test_a_resnet_in_a_pipeline_equals_one_process(tmp_path: Path) -> None:
    """BatchNorm sees the same micro-batches."""
    words = ["model.name=resnet18", "train.steps=2", "data.global_batch=8", "data.micro_batch=4"]
    words += ["optim.name=sgd", "optim.lr=0.01"]  # Adam would take noise for gradients
    whole = run(tmp_path / "whole", 1, *words)
    result = run(tmp_path, 2, *words, "parallel.strategy=pipeline")
    assert_equal(result, whole, 1e-5)


def test_a_loss_over_the_batch_is_refused(tmp_path: Path) -> None:
    words = [*WORDS, f"run.root={tmp_path}", "train.loss=user_code:mean_loss"]
    ranks = Ranks(2, words, tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert "train.loss=user_code:mean_loss: expected one loss per sample" in ranks.output()
    assert json.dumps(ranks.output()).count("Traceback") == 0
