"""Weights come in from other programs and go out again to the last bit, under every strategy."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT, SHORT_TEXT
from collectives import Collectives
from ranks import Ranks, logged_steps, together, train
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import format_utils

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.train import models
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.tools import export
from rollcall.train.checkpoint.tools.command import main as checkpoint
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import World
from rollcall.train.weights import start, stored

GPT = ["gpt", "data.seq_len=16", "data.global_batch=4", "log.every=1"]
GPT += ["model.hidden_size=32", "model.num_layers=2", SHORT_TEXT]
STILL = ["train.steps=1", "optim.lr=1e-30"]
"""One step that changes no bit of a weight that is not zero."""
LLAMA = [
    *(word for word in GPT if not word.startswith("model")),
    "model.name=transformers",
    "model.args.base=llama",
    "model.args.hidden_size=32",
    "model.args.intermediate_size=64",
    "model.args.num_hidden_layers=2",
    "model.args.num_attention_heads=4",
    "model.args.num_key_value_heads=2",
    "model.args.tie_word_embeddings=true",
]
Weights = dict[str, torch.Tensor]


def weights_of(run: Path) -> Weights:
    newest = layout.published(run / "checkpoints")
    found: Weights = export.read(newest[max(newest)])["model"]
    return found


def differing(one: Weights, other: Weights) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained model, and what was exported of it."""
    root = tmp_path_factory.mktemp("weights")
    train(2, [*GPT, "train.steps=3", f"run.root={root}", "run.name=run"], root / "logs")
    for target in ("a.safetensors", "a.pt"):
        assert checkpoint(["export", str(root / "run"), str(root / target)]) == 0
    state = torch.load(root / "a.pt", weights_only=True)
    files = {name: f"pytorch_model-{place % 3}.bin" for place, name in enumerate(state)}
    (root / "shards").mkdir()
    for file in {*files.values()}:
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        torch.save(part, root / "shards" / file)
    index = {"metadata": {}, "weight_map": files}
    (root / "shards" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return root


@pytest.mark.parametrize(
    ("parallel", "source"),
    [
        ("strategy=zero3", "a.safetensors"),
        ("strategy=pipeline", "shards"),
        ("strategy=ddp", "a.pt"),
        pytest.param("strategy=tensor", "a.safetensors", marks=pytest.mark.long),
        pytest.param("mesh=shard=2,tensor=2", "run", marks=pytest.mark.long),
    ],
)
def test_weights_come_in_to_the_last_bit(
    parallel: str, source: str, trained: Path, tmp_path: Path
) -> None:
    words = [*GPT, *STILL, f"run.root={tmp_path}", "run.name=x", f"parallel.{parallel}"]
    ranks = 4 if "mesh" in parallel else 2
    output = train(ranks, [*words, f"model.init={trained / source}"], tmp_path / "logs")
    assert re.search(rf"model\.init={trained / source}: 19 tensors \(.*\) from ", output)
    assert not differing(weights_of(trained / "run"), weights_of(tmp_path / "x"))


@pytest.mark.long
def test_frozen_parts_stay_and_new_ones_are_random(trained: Path, tmp_path: Path) -> None:
    stored_ = torch.load(trained / "a.pt", weights_only=True)
    del stored_["head.weight"]
    wrapped = {f"net.{name}".replace("block", "layer"): one for name, one in stored_.items()}
    torch.save({"state_dict": {**wrapped, "more": torch.zeros(2)}}, tmp_path / "theirs.pt")
    words = [*GPT, f"run.root={tmp_path}", f"model.init={tmp_path / 'theirs.pt'}", "train.steps=2"]
    words += ["model.init_rename=net.layer*=block*,net.*=*", "model.freeze=block*,embedding.*"]
    fresh = {}
    for strategy in ("zero3", "pipeline"):
        own = [*words, f"parallel.strategy={strategy}", f"run.name={strategy}"]
        output = train(2, [*own, "model.init_random=head.*"], tmp_path / "logs" / strategy)
        assert "1 keep random or default values: head.weight; 1 stored ones are not" in output
        changed = differing(weights_of(trained / "run"), weights_of(tmp_path / strategy))
        assert changed == {"norm.weight", "head.weight"}
        fresh[strategy] = [line["loss"] for line in logged_steps(RunDir(tmp_path, strategy))]
    assert fresh["zero3"] == pytest.approx(fresh["pipeline"], rel=1e-6)


def test_bf16_halves_the_gathers(tmp_path: Path) -> None:
    """And under zero3, the backward pass gathers all but the head, which the forward pass kept."""
    together(2, _traffic, tmp_path)
    for file in tmp_path.glob("rank-*.json"):
        for name, count in (("zero2", 1), ("zero3", 2)):
            fp32, bf16 = json.loads(file.read_text())[name]
            whole = fp32["weights"]
            for found, size in ((fp32, 4), (bf16, 2)):
                gathered = (count * whole - (count - 1) * fp32["head"]) * size // 4
                assert found["_allgather_base_"] == gathered, (name, size)
                assert found["_reduce_scatter_base_"] == whole, (name, size)


def _traffic(rank: int, folder: Path) -> None:
    world = World.join("cpu")
    found: dict[str, list[dict[str, Any]]] = {"zero2": [], "zero3": []}
    for name in found:
        for precision in ("fp32", "bf16"):
            words = [*GPT, f"parallel.strategy={name}", f"precision={precision}"]
            config = parse([*words, "model.num_layers=1"])[1]
            source = sets.load(config.data, world)
            begin = start.built(config, partial(models.build, config.model, source))
            batch = next(validation_batches(source, 4, world.rank, 2))
            strategy = Strategy(config, world, losses.Objective(losses.build("cross_entropy")))
            strategy.place(begin.model, batch, begin.fill)
            strategy.forward_backward([batch], 8)
            strategy.model.zero_grad()
            with Collectives() as collectives:
                strategy.forward_backward([batch], 8)
            found[name].append(
                {
                    **collectives.bytes,
                    "weights": sum(4 * weight.numel() for weight in strategy.model.parameters()),
                    "head": sum(
                        4 * w.numel() for w in [*strategy.model.children()][-1].parameters()
                    ),
                }
            )
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    world.leave()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed")
    root = tmp_path_factory.mktemp("llama")
    words = [*LLAMA, "train.steps=3", "optim.clip_norm=1", f"run.root={root}"]
    train(1, [*words, "run.name=run", "parallel.strategy=single"], root / "logs")
    return root


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_a_llama_of_transformers_trains_as_in_one_process(
    strategy: str, llama: Path, tmp_path: Path
) -> None:
    words = [*LLAMA, "train.steps=3", "optim.clip_norm=1", f"run.root={tmp_path}"]
    train(2, [*words, "run.name=x", f"parallel.strategy={strategy}"], tmp_path / "logs")
    one, two = (
        logged_steps(RunDir(root, name)) for root, name in ((llama, "run"), (tmp_path, "x"))
    )
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-6)


def test_transformers_loads_what_is_exported_and_it_comes_back(llama: Path, tmp_path: Path) -> None:
    library = importlib.import_module("transformers")
    folder = tmp_path / "folder"
    assert checkpoint(["export", str(llama / "run"), str(folder), "--format", "hf"]) == 0
    weights = weights_of(llama / "run")
    loaded = library.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    words = [word for word in LLAMA if not word.startswith("model.args")]
    words += [f"model.args.base={folder}", f"model.init={folder}", *STILL]
    words += [f"run.root={tmp_path}", "run.name=x", "parallel.strategy=zero3"]
    train(2, words, tmp_path / "logs")
    assert not differing(weights, weights_of(tmp_path / "x"))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_a_folder_of_several_shards_goes_in_and_out(
    strategy: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = importlib.import_module("transformers")
    folder, shards, again = (tmp_path / name for name in ("folder", "shards", "again"))
    assert checkpoint(["export", str(llama / "run"), str(folder), "--format", "hf"]) == 0
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(shards, max_shard_size="20KB")
    assert len([*shards.glob("*.safetensors")]) > 1
    words = [word for word in LLAMA if not word.startswith("model.args")]
    words += [f"model.args.base={shards}", f"model.init={shards}", *STILL]
    words += [f"run.root={tmp_path}", "run.name=x", f"parallel.strategy={strategy}"]
    train(2, words, tmp_path / "logs")
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    assert checkpoint(["export", str(tmp_path / "x"), str(again), "--format", "hf"]) == 0
    assert len([*again.glob("*.safetensors")]) > 1
    loaded = library.AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert not differing(dict(model.state_dict()), dict(loaded))


def test_adapters_alone_are_trained_saved_and_exported(llama: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder = tmp_path / "folder"
    assert checkpoint(["export", str(llama / "run"), str(folder), "--format", "hf"]) == 0
    words = [word for word in LLAMA if not word.startswith("model.args")]
    words += [f"model.args.base={folder}", f"model.init={folder}", f"run.root={tmp_path}"]
    words += ["model.args.lora={r: 2, target_modules: [q_proj, v_proj]}", "optim.lr=0.01"]
    words += ["checkpoint.save_frozen=false", "parallel.strategy=zero3", "checkpoint.every=null"]
    train(2, [*words, "run.name=x", "train.steps=4"], tmp_path / "logs")
    train(1, [*words, "run.name=y", "train.steps=2", "parallel.strategy=ddp"], tmp_path / "logs-y")
    train(2, [*words, "run.name=y", "train.steps=4"], tmp_path / "logs-y")
    weights = weights_of(tmp_path / "y")
    assert len(weights) == 8 and all(".lora_" in name for name in weights)
    losses_ = [[line["loss"] for line in logged_steps(RunDir(tmp_path, run))] for run in "xy"]
    assert losses_[0] == pytest.approx(losses_[1], rel=1e-6)
    adapters = tmp_path / "adapters"
    assert checkpoint(["export", str(tmp_path / "y"), str(adapters), "--format", "peft"]) == 0
    library = importlib.import_module("transformers")
    base = library.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, adapters).base_model.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("base", "more"),
    [
        ("vit", ["digits", "model.args.patch_size=2"]),
        ("bert", [*GPT[:3], "log.every=1", "model.args.auto=AutoModelForMaskedLM"]),
        ("gpt2", [*GPT[:3], "log.every=1"]),
    ],
)
def test_other_families_of_transformers(base: str, more: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    words = [*more, "model.name=transformers", f"model.args.base={base}", "train.steps=3"]
    words += ["data.global_batch=4", "log.every=1", f"run.root={tmp_path}"]
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    sizes |= {"intermediate_size": 32, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    if base == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "resid_pdrop": 0, "embd_pdrop": 0}
        sizes |= {"attn_pdrop": 0}
    words += [f"model.args.{key}={value}" for key, value in sizes.items()]
    found = {}
    for name, ranks in (("single", 1), ("zero3", 2), ("tensor", 2)):
        own = [f"parallel.strategy={name}", f"run.name={name}"]
        if name == "tensor" and base == "gpt2":  # its layers are not nn.Linear
            refused = Ranks(ranks, [*words, *own], tmp_path / "logs" / name)
            assert 0 not in refused.wait()
            assert "has no plan for tensor parallelism: give the model" in refused.output()
            piped = Ranks(2, [*words, "parallel.strategy=pipeline", "run.name=p"], tmp_path / "p")
            assert 0 not in piped.wait()
            assert "pipeline_layers" in piped.output()
            continue
        train(ranks, [*words, *own], tmp_path / "logs" / name)
        found[name] = [line["loss"] for line in logged_steps(RunDir(tmp_path, name))]
    for losses_ in found.values():
        assert losses_ == pytest.approx(found["single"], rel=1e-6)


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForMaskedLM"])
def test_a_model_of_transformers_computes_the_loss_itself(auto: str, tmp_path: Path) -> None:
    """Its mean over the labels of a micro-batch of unequal rows becomes that of the whole batch."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    base = "gpt2" if "Causal" in auto else "bert"
    sizes = "n_layer=1 n_head=2 n_embd=16 resid_pdrop=0 embd_pdrop=0 attn_pdrop=0"
    if base == "bert":
        sizes = "num_hidden_layers=1 num_attention_heads=2 hidden_size=16 intermediate_size=32 "
        sizes += "hidden_dropout_prob=0 attention_probs_dropout_prob=0"
    words = ["device=cpu", "data.name=user_tasks:words", "data.pad=true", "train.steps=3"]
    words += ["data.global_batch=10", "log.every=1", f"run.root={tmp_path}", "optim.lr=0.01"]
    words += ["model.name=transformers", f"model.args.auto={auto}", f"model.args.base={base}"]
    words += [f"model.args.{word}" for word in [*sizes.split(), "vocab_size=32"]]
    own = "next_token" if base == "gpt2" else "cross_entropy"
    found = {}
    for name, ranks, loss in (("one", 1, own), ("ddp", 2, "model"), ("zero3", 2, "model")):
        strategy = "single" if ranks == 1 else name
        more = [f"run.name={name}", f"train.loss={loss}", f"parallel.strategy={strategy}"]
        more += ["data.micro_batch=3"] * (ranks > 1)
        train(ranks, [*words, *more], tmp_path / "logs" / name)
        found[name] = [line["loss"] for line in logged_steps(RunDir(tmp_path, name))]
    assert found["ddp"] == pytest.approx(found["one"], rel=1e-6)
    assert found["zero3"] == pytest.approx(found["one"], rel=1e-6)


def test_a_folder_of_torch_gets_the_command_that_converts_it(tmp_path: Path) -> None:
    dcp.save({"head.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(ValueError, match=r"dcp_to_torch .*theirs weights\.pt"):
        stored.open_(str(tmp_path / "theirs"))
    format_utils.dcp_to_torch_save(tmp_path / "theirs", tmp_path / "weights.pt")
    assert stored.open_(str(tmp_path / "weights.pt")).shapes == {"head.weight": (2, 3)}


@pytest.mark.long
def test_the_example_trains_from_weights_with_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["model.hidden_size=32", "model.num_layers=2", f"run.root={tmp_path}"]
    train(
        1,
        ["gpt", *own, "run.name=base", "train.steps=2", "data.seq_len=12", SHORT_TEXT],
        tmp_path / "logs",
    )
    monkeypatch.chdir(ROOT / "examples" / "sums")  # the ranks import its module
    words = [
        "./sums.yaml",
        *own,
        f"model.init={tmp_path / 'base'}",
        "run.name=sums",
        "train.steps=20",
        "log.every=1",
    ]
    assert "19 tensors" in train(2, words, tmp_path / "logs-2")
    losses_ = [line["loss"] for line in logged_steps(RunDir(tmp_path, "sums"))]
    assert losses_[-1] < 0.8 * losses_[0]
    changed = differing(weights_of(tmp_path / "base"), weights_of(tmp_path / "sums"))
    assert changed and "embedding.weight" not in changed
