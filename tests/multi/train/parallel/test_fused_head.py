"""The last layer and the loss computed together: under every strategy the losses of one process.

Where whole logits would be used, the runs fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import leave_out_operations
from torch.nn import functional

from rollcall.tools.bench import rank_jobs
from rollcall.tools.bench.rank_jobs import Job
from rollcall.train.checkpoint.tools import export
from rollcall.train.numerics import cross_entropy

WORDS = (
    *(word for word in rank_jobs.WORDS if not word.startswith("train.steps")),
    "train.steps=3",
    "data.name=synthetic_tokens",
    "data.num_samples=64",
    "data.num_classes=67",  # 34 and 33 on two tensor ranks
    "data.seq_len=16",
    "data.global_batch=16",
    "data.micro_batch=4",
    "model.hidden_size=32",
    "model.num_layers=2",
    "optim.name=sgd",
    "optim.lr=1",
    'parallel.check="off"',
)
SMOOTHED = "train.loss_args={label_smoothing: 0.1, z_loss: 0.01}"
SEQUENCE = "parallel.sequence_parallel=true"
UNTIED = ("model.name=gpt", SMOOTHED)
TIED = ("model.name=llama", "model.tied=true")
TRANSFORMERS = (
    "model.name=transformers",
    "model.args={base: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}",
)
Cells = dict[str, tuple[tuple[str, ...], ...]]
"""The words of each run, and the words of its models."""
CELLS: dict[int, Cells] = {
    1: {"single": ((), UNTIED, TIED), "exact": (("exact=true", "data.micro_batch=null"), UNTIED)},
    2: {
        "ddp": ((), UNTIED, TIED),
        "zero1": (("parallel.strategy=zero1",), UNTIED),
        "zero2": (("parallel.strategy=zero2",), TIED),
        "zero3": (("parallel.strategy=zero3",), UNTIED, TIED),
        "tensor": (("parallel.strategy=tensor",), UNTIED, TIED),
        "sequence": (("parallel.strategy=tensor", SEQUENCE), UNTIED),
        "context": (("parallel.mesh=context=2",), UNTIED),
        "pipeline": (("parallel.strategy=pipeline",), UNTIED),
        "gpipe": (("parallel.strategy=pipeline", "parallel.schedule=gpipe"), UNTIED),
    },
    4: {
        "shard×sequence": (("parallel.mesh=shard=2,tensor=2", SEQUENCE), UNTIED, TIED),
        "pipeline×sequence": (("parallel.mesh=pipeline=2,tensor=2", SEQUENCE), UNTIED),
        "pipeline×shard": (("parallel.mesh=pipeline=2,shard=2",), UNTIED),
        "context×tensor": (("parallel.mesh=context=2,tensor=2",), UNTIED),
    },
}


OF_TRANSFORMERS: Cells = {
    "ddp": ((), TRANSFORMERS),
    "zero3": (("parallel.strategy=zero3", "precision=fp32"), TRANSFORMERS),
    "tensor": (("parallel.strategy=tensor",), TRANSFORMERS),
}


def _cut_small() -> None:
    leave_out_operations()
    cross_entropy.CHUNK, cross_entropy.PRODUCT = 67, 5 * 67

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("these are whole logits")

    setattr(functional, "cross_entropy", refuse)  # noqa: B010


@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.campaign)],
)
def test_losses_and_weights_are_those_of_whole_logits(ranks: int, tmp_path: Path) -> None:
    _compare(ranks, CELLS[ranks], tmp_path)


@pytest.mark.long
def test_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _compare(2, OF_TRANSFORMERS, tmp_path)


def _compare(ranks: int, cells: Cells, tmp_path: Path) -> None:
    models = dict.fromkeys(own for _, *models in cells.values() for own in models)
    plain = {own: Job(tmp_path / f"plain-{n}", [*WORDS, *own]) for n, own in enumerate(models)}
    rank_jobs.run([*plain.values()], tmp_path / "logs-1", 1, prepare=leave_out_operations)
    jobs = {
        (name, own): Job(tmp_path / f"{name}-{number}", [*WORDS, *own, *words])
        for name, (words, *models) in cells.items()
        for number, own in enumerate(models)
    }
    rank_jobs.run([*jobs.values()], tmp_path / "logs", ranks, prepare=_cut_small)
    for (name, own), job in jobs.items():
        assert rank_jobs.apart(job.losses(), plain[own].losses()) <= 1e-6, name
        accuracy = [
            one.run_dir.read_events("evaluated")[-1]["accuracy"] for one in (job, plain[own])
        ]
        assert accuracy[0] == accuracy[1], name
        expected = _weights(plain[own])
        for key, tensor in _weights(job).items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=0, atol=1e-6, msg=f"{name} {key}"
            )


def _weights(job: Job) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = export.read(max(job.run_dir.checkpoints.iterdir()))["model"]
    return model
