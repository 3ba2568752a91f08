"""Mixtures of experts of transformers: sharded as on one rank, exported, and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkout import SHORT_TEXT
from ranks import logged_steps, train

from rollcall.records.run_dir import RunDir
from rollcall.train.checkpoint.tools import export
from rollcall.train.checkpoint.tools.command import main as checkpoint

SIZES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
BASE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "kind", ["mixtral", *(pytest.param(kind, marks=pytest.mark.campaign) for kind in [*SIZES][1:])]
)
def test_shards_train_as_one_rank_and_transformers_loads_the_result(
    tmp_path: Path, kind: str
) -> None:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    words = ["gpt", "device=cpu", "data.name=text", SHORT_TEXT, "data.seq_len=16", "log.every=1"]
    words += ["data.global_batch=8", "train.steps=3", "model.name=transformers"]
    words += [f"model.args.{name}={value}" for name, value in (BASE | SIZES[kind]).items()]
    words += [f"model.args.base={kind}", f"run.root={tmp_path}"]
    train(1, [*words, "run.name=whole"], tmp_path / "logs")
    train(2, [*words, "run.name=cut", "parallel.strategy=zero3"], tmp_path / "more")
    mesh = "parallel.mesh=shard=2,expert=2"
    train(4, [*words, "run.name=spread", mesh], tmp_path / "most")
    runs = [RunDir(tmp_path, name) for name in ("whole", "cut", "spread")]
    first, *others = [[line["loss"] for line in logged_steps(run)] for run in runs]
    assert len(first) == 3
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-6)
    for run in runs[1:]:
        folder = tmp_path / f"folder-{run.name}"
        assert checkpoint(["export", str(run.path), str(folder), "--format", "hf"]) == 0
        loaded = library.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, tensor in export.read(max(run.checkpoints.iterdir()))["model"].items():
            torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
