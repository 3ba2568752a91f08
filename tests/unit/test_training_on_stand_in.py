"""Whole trainings on a stand-in for CUDA: the losses of a CPU, and no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_stand_in import Block, Cuda, Stream

from rollcall.run_dir import RunDir
from rollcall.train.main import main

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
    assert found == pytest.approx(on_cpu, rel=1e-5)


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
