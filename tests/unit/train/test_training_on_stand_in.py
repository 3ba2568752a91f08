"""Whole trainings on a stand-in for CUDA: the losses of a CPU, and no race."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cuda_stand_in import Block, Cuda, Stream

import rollcall
from rollcall.records.run_dir import RunDir
from rollcall.train.main import main
from rollcall.train.numerics import losses as losses_of
from rollcall.train.numerics.randomness import Fork, set_seed

WORDS = ["digits", "train.steps=4", "data.global_batch=24", "log.every=1", "checkpoint.every=2"]

CONVOLUTION = 24 * 16 * 8 * 8 * 4
"""Bytes of the largest activation."""


def losses(root: Path, name: str, *words: str) -> list[float]:
    assert main([*WORDS, f"run.root={root}", f"run.name={name}", *words]) == 0
    return [line.loss for line in RunDir(root, name).read_metrics() if line.loss is not None]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu"), "cpu", "device=cpu")


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (1, "parallel.strategy=ddp profile.tool=nsight profile.steps=2:4"),
        (1, "parallel.strategy=single data.micro_batch=auto"),
        (2, "parallel.strategy=split"),
    ],
)
def test_losses_are_those_of_a_cpu(
    gpus: int, words: str, on_cpu: list[float], tmp_path: Path
) -> None:
    with Cuda(devices=gpus) as cuda:
        found = losses(tmp_path, "gpu", "device=cuda", *words.split())
    assert not cuda.reports
    assert not cuda.ranges
    assert cuda.joined == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
    assert found == pytest.approx(on_cpu, rel=1e-5)


def measured(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that measures, and does not count the classes 0 to 4."""
    rollcall.measure("largest", outputs.amax(), "max")
    rollcall.measure("scores", outputs)
    return losses_of.per_sample_loss(outputs, targets.masked_fill(targets < 5, -100))


def test_targets_that_do_not_count_and_measured_numbers(tmp_path: Path) -> None:
    words = ["data.name=user_code:one_ignored", "train.evaluate_every=null", "train.steps=8"]
    own = [f"train.loss={__name__}:measured"]
    found = {}
    for name in ("cpu", "cuda"):
        with Cuda() if name == "cuda" else nullcontext() as cuda:
            plain = losses(tmp_path, name, f"device={name}", *words)
            losses(tmp_path, f"{name}-own", f"device={name}", *words, *own)
        lines = RunDir(tmp_path, f"{name}-own").read_metrics()
        found[name] = plain + [
            line.more[key] for line in lines[1:] for key in ("largest", "scores")
        ]
        assert cuda is None or not cuda.reports
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)


def test_a_rank_without_memory_goes_on_with_smaller_pieces(
    on_cpu: list[float], tmp_path: Path
) -> None:
    with Cuda() as cuda:
        words = ["device=cuda", "parallel.strategy=single"]
        allocate, large = cuda.allocate, []

        def scarce(size: int, stream: Stream) -> Block:
            if size >= CONVOLUTION:
                large.append(size)
                if len(large) == 9:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return allocate(size, stream)

        cuda.allocate = scarce  # type: ignore[method-assign]
        found = losses(tmp_path, "gpu", *words)
    assert len(large) > 9
    assert not cuda.reports
    assert found == pytest.approx(on_cpu, rel=1e-4)
    assert [*tmp_path.glob("gpu/faults/memory-step-*-rank-0.pickle")]


def test_a_gpu_that_is_missing_or_too_old_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"run.root={tmp_path}", "run.name=a", "device=cuda"]
    if not torch.cuda.is_available():
        assert main(words) == 2
        assert "sees none: check `nvidia-smi`" in capsys.readouterr().err
    with Cuda() as cuda:
        cuda.capability = 7, 5
        assert main([*words, "precision=fp8"]) == 2
    assert "got NVIDIA stand-in with 7.5" in capsys.readouterr().err


def test_random_numbers_of_a_piece_leave_the_common_stream_alone() -> None:
    with Cuda():
        set_seed(1, "step")
        first, fork = torch.rand(3, device="cuda:0").tolist(), Fork("cuda", "piece", 0)
        with fork.inside():
            own = torch.rand(3, device="cuda:0").tolist()
        following = torch.rand(3, device="cuda:0").tolist()
        set_seed(1, "step")
        assert [torch.rand(3, device="cuda:0").tolist() for _ in range(2)] == [first, following]
    assert own != following
