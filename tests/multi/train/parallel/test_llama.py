"""A Llama spread over ranks equals one process's, and exports what it trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import leave_out_operations

from rollcall.tools.bench import rank_jobs
from rollcall.tools.bench.rank_jobs import Job
from rollcall.train.checkpoint.tools import export
from rollcall.train.weights import stored

WORDS = (
    *(word for word in rank_jobs.WORDS if not word.startswith("train.steps")),
    "train.steps=3",
    "data.name=synthetic_tokens",
    "data.num_samples=64",
    "data.num_classes=67",
    "data.seq_len=16",
    "data.global_batch=16",
    "data.micro_batch=4",
    "model.name=llama",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.ffn_size=48",
    "model.rope_theta=500.0",
    "optim.name=sgd",
    "optim.lr=0.1",
)
SEQUENCE = "parallel.sequence_parallel=true"
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor": (2, ("parallel.strategy=tensor", "model.tied=true")),
    "sequence": (2, ("parallel.strategy=tensor", SEQUENCE)),
    "context": (2, ("parallel.strategy=context",)),
    "zero3": (2, ("parallel.strategy=zero3", "model.tied=true")),
    "pipeline": (2, ("parallel.strategy=pipeline",)),
    "recomputed": (
        2,
        ("parallel.strategy=tensor", SEQUENCE, "model.activation_checkpointing=selective"),
    ),
    "context×sequence": (4, ("parallel.mesh=context=2,tensor=2", SEQUENCE)),
    "pipeline×tensor": (4, ("parallel.mesh=pipeline=2,tensor=2",)),
    "shard×sequence": (4, ("parallel.mesh=shard=2,tensor=2", SEQUENCE)),
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mesh_equals_one_process(ranks: int, tmp_path: Path) -> None:
    jobs = {
        name: Job(tmp_path / name, [*WORDS, *words])
        for name, (count, words) in MESHES.items()
        if count == ranks
    }
    alone = {
        tied: Job(tmp_path / f"alone-{tied}", [*WORDS, f"model.tied={str(tied).lower()}"])
        for tied in (False, True)
    }
    rank_jobs.run(list(alone.values()), tmp_path / "logs-1", 1, prepare=leave_out_operations)
    rank_jobs.run(list(jobs.values()), tmp_path / "logs", ranks, prepare=leave_out_operations)
    for name, job in jobs.items():
        whole = alone["model.tied=true" in job.words]
        assert job.losses() == pytest.approx(whole.losses(), rel=1e-6), name
        found, expected = _exported(job), _exported(whole)
        assert found.keys() == expected.keys()
        assert ("lm_head.weight" in found) == ("model.tied=true" not in job.words)
        for key, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=0, atol=1e-6, msg=f"{name} {key}"
            )


def _exported(job: Job) -> dict[str, torch.Tensor]:
    folder = job.root / "hf"
    if not folder.exists():
        export.export(max(job.run_dir.checkpoints.iterdir()), folder, "hf")
    source = stored.open_(str(folder))
    tensors = {name: torch.empty(shape) for name, shape in source.shapes.items()}
    source.fill(tensors)
    return tensors
