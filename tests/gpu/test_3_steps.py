"""Training steps on a GPU. Run `./env/run pytest tests/gpu` on a machine with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from ranks import logged_steps, train

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

WORDS = ["device=cuda", "log.every=1", "optim.schedule=constant", "optim.warmup_steps=0"]
GPT = [
    "gpt",
    "train.steps=20",
    "data.seq_len=64",
    "model.hidden_size=64",
    "data.global_batch=32",
    "checkpoint.every=null",
]
NUMBERED = ["data.name=user_code:numbered_samples", "train.steps=6", "data.global_batch=16"]


def run(root: Path, *words: str) -> RunDir:
    name = f"run-{len(list(root.iterdir()))}"
    train(1, [*words, *WORDS, f"run.root={root}", f"run.name={name}"], root / f"logs-{name}")
    return RunDir(root, name)


def losses(run_dir: RunDir) -> list[float]:
    return [line["loss"] for line in logged_steps(run_dir)]


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir.events) if line["event"] == name]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("tf32", 2e-3), ("bf16", 2e-2), ("fp16", 5e-3), ("fp8", 5e-2)],
)
def test_number_formats_stay_close_to_fp32(
    tmp_path: Path, precision: str, tolerance: float
) -> None:
    """tf32, bf16, fp16 and fp8 train, and really compute in another format. 1 min each."""
    expected = losses(run(tmp_path, *GPT))
    found = losses(run(tmp_path, *GPT, f"precision={precision}"))
    assert found != expected
    # Steps that overflowed in fp16 have no line.
    assert found[:10] == pytest.approx(expected[: len(found)][:10], rel=tolerance)


@pytest.mark.parametrize(
    "word",
    [
        "train.compile=true",
        "model.activation_checkpointing=selective",
        "optim.implementation=foreach",
        "parallel.strategy=zero3",
    ],
)
def test_options_for_speed_and_memory_keep_the_losses(tmp_path: Path, word: str) -> None:
    """Compiling, recomputing and sharding change no loss. 1 min each."""
    expected = losses(run(tmp_path, *GPT))
    assert losses(run(tmp_path, *GPT, word)) == pytest.approx(expected, rel=1e-3)


def test_channels_last_keeps_the_losses(tmp_path: Path) -> None:
    """Another memory format changes no loss. 1 min."""
    words = (
        "digits",
        "train.steps=10",
        "model.name=user_code:with_batchnorm",
        "model.sync_batchnorm=true",
    )
    expected = losses(run(tmp_path, *words))
    found = losses(run(tmp_path, *words, "model.channels_last=true"))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    tmp_path: Path, implementation: str, name: str
) -> None:
    """A NaN is skipped on the device, and training continues. 1 min each."""
    words = [*NUMBERED, f"optim.implementation={implementation}", f"optim.name={name}"]
    run_dir = run(tmp_path, *words, "model.name=user_code:nan_output")
    [fault] = events(run_dir, "skipped")
    assert fault["samples"] == [user_code.BAD]
    healthy = losses(run(tmp_path, *words, "model.name=user_code:healthy"))
    del healthy[fault["step"] - 1 :]
    assert losses(run_dir)[: len(healthy)] == pytest.approx(healthy, rel=1e-5)
    assert all(loss < 10 for loss in losses(run_dir))


def test_running_out_of_memory_reduces_the_micro_batch(tmp_path: Path) -> None:
    """A step that runs out of memory is repeated in smaller pieces. 1 min."""
    healthy = losses(run(tmp_path, *NUMBERED, "model.name=user_code:healthy"))
    run_dir = run(tmp_path, *NUMBERED, "model.name=user_code:out_of_memory")
    assert [event["micro_batch"] for event in events(run_dir, "out_of_memory")] == [8, 4, 2]
    assert losses(run_dir) == pytest.approx(healthy, rel=1e-5)
    [first, *_] = sorted((run_dir.path / "faults").glob("memory-step-*-rank-0.pickle"))
    assert first.stat().st_size > 0


def test_metrics_report_the_fraction_of_the_peak_speed(tmp_path: Path) -> None:
    """The chip is known, and its peak too. 1 min."""
    name = torch.cuda.get_device_name()
    if not any(known in name for known in ("A100", "H100", "H200")):
        pytest.skip(f"the peak of {name} is not in train/throughput.py")
    lines = logged_steps(run(tmp_path, *GPT, "precision=bf16"))
    assert 0 < lines[-1]["mfu"] < 1 and lines[-1]["tokens_per_second"] > 0
