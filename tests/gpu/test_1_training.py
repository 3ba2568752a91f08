"""Training and resuming on a GPU. Run `./env/run pytest tests/gpu` on a machine with one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import logged_steps, train

from rollcall.records.run_dir import RunDir


def losses(root: Path, name: str, *words: str) -> list[float]:
    train(1, ["digits", "log.every=1", f"run.root={root}", f"run.name={name}", *words], root / name)
    return [line["loss"] for line in logged_steps(RunDir(root, name))]


def test_losses_on_a_gpu_are_close_to_the_cpu(tmp_path: Path) -> None:
    """A model trains on the GPU as on the CPU. 1 min."""
    words = ("train.steps=20", "data.micro_batch=24")
    on_gpu = losses(tmp_path, "gpu", "device=cuda", *words)
    on_cpu = losses(tmp_path, "cpu", "device=cpu", *words)
    # The GPU and the CPU add in different orders, and twenty AdamW updates amplify the difference.
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_resume_on_a_gpu(tmp_path: Path) -> None:
    """A checkpoint from the GPU resumes there. 1 min."""
    words = ("device=cuda", "optim.schedule=constant")
    whole = losses(tmp_path, "whole", "train.steps=20", *words)
    losses(tmp_path, "parts", "train.steps=10", *words)
    assert losses(tmp_path, "parts", "train.steps=20", *words) == pytest.approx(whole, rel=1e-5)
