"""The planner's closed forms, its choices, its refusals and its report of errors."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from rollcall.config import parse
from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.tools.plan import command as plan
from rollcall.tools.plan import (
    margins,
    memory,
    run_cost,
    search,
    shapes,
    step_time,
    validate,
)
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.machine import Machines
from rollcall.tools.plan.model import transformer
from rollcall.tools.plan.shapes import named
from rollcall.tools.plan.validate import GROUP

GOLDEN = ROOT / "tests" / "golden"
LLAMA = named("llama-3-8b")
H100 = Machines().machine("h100")
GPT = ["gpt", "--gpus", "8", "--gpu", "h100"]
LINE = ["llama-3-8b", "--gpus", "64", "--gpu", "h100"]


def test_known_shapes_have_their_published_parameters() -> None:
    counts = {
        "llama-3-8b": 8.03,
        "meta-llama/Llama-3.1-70B-Instruct": 70.6,
        "Mistral-7B-v0.1": 7.24,
    }
    counts |= {"gemma-2-9b": 9.24, "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "deepseek-v3": 671}
    counts |= {"DeepSeek-V2-Lite": 15.7, "olmoe-1b-7b": 6.92, "llama4-maverick": 400.7}
    for name, count in counts.items():
        assert named(name).weights == pytest.approx(count * 1e9, rel=2e-3), name


CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
        **{"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "deepseek-v3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432},
        **{"vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3},
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 128, "v_head_dim": 128},
    },
    "llama-4-maverick": {
        "text_config": {
            **{"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48},
            **{"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 202048},
            **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "head_dim": 128},
            **{"num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
        }
    },
    "gpt-2": {
        **{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        "vocab_size": 50257,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_hugging_face_is_the_known_shape(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = shapes.from_file(str(tmp_path), named(name).length)
    assert dataclasses.replace(model, name=name) == named(name)


def test_heads_of_a_falcon_share_keys_and_values(tmp_path: Path) -> None:
    """It has one head of keys, though its file says 71."""
    numbers = {"hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024}
    numbers |= {"num_attention_heads": 71, "num_kv_heads": 71, "multi_query": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", **numbers}))
    assert shapes.from_file(str(tmp_path)).weights == pytest.approx(6.92e9, rel=2e-3)


def test_other_configs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in {
        "{": "expected the config.json of a decoder-only transformer",
        '{"hidden_size": 8}': "no num_hidden_layers or n_layer",
        '{"type_vocab_size": 2}': "type_vocab_size is of another kind of model",
    }.items():
        (tmp_path / "config.json").write_text(text)
        assert plan.main(["--shape", str(tmp_path), "--gpus", "8", "--gpu", "h100"]) == 2
        assert message in capsys.readouterr().err


def test_experts_are_held_once_and_computed_by_who_holds_them() -> None:
    """Over 8 expert ranks: memory, products and the imbalance, against the count by hand."""
    mixtral = named("mixtral-8x7b")
    whole, parts = (
        Layout(data=64, expert=expert, micro=1, batch=64, imbalance=2.0) for expert in (1, 8)
    )
    of_experts = 32 * 8 * 3 * 4096 * 14336
    held = [memory.of(mixtral, layout, H100)["optimizer state"] / 8 for layout in (whole, parts)]
    assert held[0] - held[1] == pytest.approx(of_experts * 7 / 8)
    even = dataclasses.replace(parts, imbalance=1.0)
    layers = [step_time.work(mixtral.layer, layout, H100) for layout in (even, parts)]
    rates = H100.chip.flops["bf16"] * H100.chip.product
    more = layers[1]["matrix products"] - layers[0]["matrix products"]
    assert more == pytest.approx(3 * 2 * 4096 * 2 * 3 * 4096 * 14336 / rates, rel=0.1)
    # A row of 8,192 bytes to two experts, there and back, for a pass and its gradients.
    exchange = 4 * 2 * 2 * 4096 * 8192 * 7 / 8 / (450e9 * step_time.LINKS_INSIDE)
    assert layers[1]["expert collectives"] == pytest.approx(exchange, rel=0.1)
    nemo = Machines().machine("h100", "nemo")  # whose host starts each expert's products alone
    alone = dataclasses.replace(even, expert=1, micro=1)
    assert step_time.of(mixtral, alone, nemo).total() >= 32 * (3.0 + 0.2 * 2 * 8) / 1e3
    shared = dataclasses.replace(parts, zero=3)  # expert ranks share the state of the rest
    assert memory.of(mixtral, shared, H100)["optimizer state"] == mixtral.weights * 8 / 64


def test_schedules_shorten_the_bubble_by_their_papers_formulas() -> None:
    layout = Layout(stages=4, micro=1, batch=16, zero=0)
    bubbles = {
        (name, chunks): step_time.of(
            LLAMA, dataclasses.replace(layout, schedule=name, chunks=chunks), H100
        )["pipeline bubble"]
        for name, chunks in search.SCHEDULES
    }
    whole = bubbles["1f1b", 1]
    assert bubbles["interleaved", 4] == pytest.approx(whole / 4, rel=0.02)
    assert bubbles["zero-bubble", 2] == pytest.approx(whole / 6, rel=0.02)
    assert bubbles["zbv", 2] < bubbles["zero-bubble", 2] < bubbles["dualpipev", 2] < whole / 2


def test_pieces_of_a_stage_exchange_gradients_beside_each_other() -> None:
    """With 1F1B all gradients are complete in the last micro-batch, interleaved ones before."""
    layout = Layout(data=64, stages=4, zero=1, micro=1, batch=512)
    pieces = dataclasses.replace(layout, schedule="interleaved", chunks=4)
    short = named("llama-3-8b", 512)
    seconds = [step_time.of(short, one, H100)["data collectives"] for one in (layout, pieces)]
    assert seconds[1] < 0.8 * seconds[0]


def test_a_fused_gate_keeps_three_values_of_four() -> None:
    """Both products and their gated product, but not the activation, which a kernel computes again.

    So do torch.compile's partitions of such a layer (aot_eager_decomp_partition), and Megatron-LM's
    SwiGLU, whose function saves its input and hands its output to the next product.
    """
    compiled = Machines().machine("h100", "rollcall compiled")
    layout = Layout(data=8, zero=3, micro=2, batch=64)
    eager, fused = (memory.stage(LLAMA, layout, m, 0, 32)["activations"] for m in (H100, compiled))
    assert eager - fused == 32 * 2 * 8192 * 14336 * 2
    mixtral = named("mixtral-8x7b")
    eager, fused = (
        memory.stage(mixtral, layout, m, 0, 32)["activations"] for m in (H100, compiled)
    )
    assert eager - fused == 32 * 2 * 4096 * 14336 * 2 * 2  # two experts for each token


def test_a_pipeline_keeps_gathered_weights() -> None:
    layout = Layout(data=8, stages=4, zero=3, micro=1, batch=64)
    needed = memory.stage(LLAMA, layout, H100, 1, 8)
    assert needed["gathered layers"] == (2 * 8 + 4) * LLAMA.layer.weights  # and a gradient


def test_terms_add_up_and_follow_the_layout() -> None:
    layout = Layout(data=8, zero=3, micro=1, batch=64)
    needed = memory.of(LLAMA, layout, H100)
    assert needed["optimizer state"] == LLAMA.weights * 8 / 8
    assert needed["weights"] == LLAMA.weights * 4 / 8
    assert needed["gradients"] == LLAMA.weights * 4  # whole until the last of eight micro-batches
    at_once = dataclasses.replace(layout, micro=8)
    assert memory.of(LLAMA, at_once, H100)["gradients"] == LLAMA.weights * 4 / 8
    scattered = dataclasses.replace(layout, scattered=True)
    assert memory.of(LLAMA, scattered, H100)["gradients"] == LLAMA.weights * 4 / 8
    for zero in (2, 3):  # once for each of eight micro-batches
        once, often = (
            step_time.of(LLAMA, dataclasses.replace(one, zero=zero), H100)
            for one in (layout, scattered)
        )
        assert often["data collectives"] > once["data collectives"]
        assert often["adding gradients"] == pytest.approx(once["adding gradients"] / 8)
    seconds = step_time.of(LLAMA, layout, H100)
    least = LLAMA.flops() * 64 / 8 / H100.chip.flops["bf16"]
    assert least / 0.67 < seconds.total() < 3 * least
    again = step_time.of(LLAMA, dataclasses.replace(layout, recompute="full"), H100)
    # torch's recomputation stops before the last product, whose output nothing keeps.
    last = LLAMA.layer.products[-1]
    left_out = (
        last.inner * last.columns / sum(one.inner * one.columns for one in LLAMA.layer.products)
    )
    times = (4 - left_out) / 3
    assert again["matrix products"] == pytest.approx(seconds["matrix products"] * times, rel=0.05)


def test_memory_is_what_megatrons_own_tests_measure() -> None:
    """Peaks of the last stage on eight A100, https://github.com/NVIDIA/Megatron-LM (BSD 3-Clause),
    tests/functional_tests, commit d98e8a6: 12 layers of width 512 in many layouts."""
    errors = []
    for row in csv.DictReader((GOLDEN / "megatron_memory.csv").read_text().splitlines()):
        names = ("tensor", "stages", "context", "chunks", "zero")
        degrees: dict[str, Any] = {name: int(row[name]) for name in names}
        ranks = degrees["tensor"] * degrees["stages"] * degrees["context"]
        vocab = -(-50257 // (128 * degrees["tensor"])) * 128 * degrees["tensor"]
        shape = {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048}
        tied = row["tied"] == "1"
        model = transformer("gpt", **shape, vocab=vocab, length=1024, gated=False, tied=tied)
        sequence, recompute = row["sequence"] == "1", row["recompute"]
        layout = Layout(
            8 // ranks, **degrees, sequence=sequence, recompute=recompute, micro=4, batch=32
        )
        machine = Machines().machine("a100", row["software"])
        last = layout.stages - 1
        layers = step_time.cuts(model, layout, machine)[last]
        terms = memory.stage(model, layout, machine, last, layers)
        needed = (terms.total() - terms["workspaces"]) / 2**20
        errors.append(abs(needed / float(row["mebibytes"]) - 1))
    assert statistics.median(errors) < 0.05 and max(errors) < 0.15, errors


def test_attention_without_fusion_keeps_five_bytes_a_score() -> None:
    """Korthikanti et al., https://arxiv.org/abs/2205.05198, equation 1; selective: equation 6."""
    layout = Layout(tensor=2, micro=3, batch=3)
    old = Machines().machine("a100", "megatron-lm")
    layers = LLAMA.layers
    whole = memory.stage(LLAMA, layout, old, 0, layers)["activations"]
    selective = dataclasses.replace(layout, recompute="selective")
    kept = memory.stage(LLAMA, selective, old, 0, layers)["activations"]
    assert whole - kept == pytest.approx(5 * 32 * 8192**2 * 3 / 2 * layers)


def test_fp32_moves_and_sends_twice_the_bytes() -> None:
    layout = Layout(data=8, tensor=2, zero=3, micro=1, batch=64)
    half = step_time.of(LLAMA, layout, H100)
    full = step_time.of(LLAMA, dataclasses.replace(layout, precision="fp32"), H100)
    moved = [
        step_time.work(LLAMA.layer, dataclasses.replace(layout, precision=one), H100)
        for one in ("fp32", "bf16")
    ]
    assert moved[0]["other operations"] == 2 * moved[1]["other operations"]
    assert full["tensor collectives"] == pytest.approx(2 * half["tensor collectives"], rel=0.1)


def test_zero_2_pays_the_latency_of_a_ring_for_each_layer() -> None:
    """With 512 ranks a step of a small model waits for 2 x 511 hops of each layer."""
    small = named("gpt-2", 64)
    layout = Layout(data=512, zero=2, micro=1, batch=512)
    hops = 2 * small.layers * 511 * H100.software.hop
    assert step_time.of(small, layout, H100)["data collectives"] > step_time.SLOWED * hops


def test_a_ring_of_context_ranks_hides_beside_the_attention() -> None:
    layout = Layout(data=4, context=4, micro=1, batch=4)
    ring = Machines().machine("h100", "megatron")
    exchanged, rotated = (
        step_time.work(LLAMA.layer, layout, machine)["context collectives"]
        for machine in (H100, ring)
    )
    assert rotated < exchanged / 4  # 8 of 32 heads have keys and values


def test_a_pipelines_bubble_is_what_1f1b_leaves() -> None:
    """Equal stages: one more micro-batch for each further stage, https://arxiv.org/abs/2104.04473."""
    layout = Layout(stages=4, micro=1, batch=8)
    equal = Machines().machine("h100", "deepspeed")  # rollcall's last stages have fewer layers
    seconds = step_time.of(LLAMA, layout, equal)
    slot = 8 * step_time.work(LLAMA.layer, layout, equal).total()
    assert seconds["pipeline bubble"] == pytest.approx(3 * slot, rel=0.05)


def test_a_factor_stretches_every_term() -> None:
    slow = dataclasses.replace(H100, factor=1.5)
    layout = Layout(data=8, batch=64)
    plain = step_time.of(LLAMA, layout, H100).total()
    assert step_time.of(LLAMA, layout, slow).total() == pytest.approx(1.5 * plain)


def test_the_best_layouts_fit_and_come_first() -> None:
    found = search.search(LLAMA, 64, H100, Layout(batch=512))
    assert found == sorted(found, key=lambda choice: choice.time)
    assert all(memory.fits(choice.bytes, H100) for choice in found)
    assert all(choice.layout.ranks == 64 for choice in found)
    fewest = search.smallest(LLAMA, 64, H100, Layout())
    assert fewest and not search.search(LLAMA, fewest.layout.ranks // 2, H100, Layout(batch=64))


@pytest.mark.parametrize(("name", "gpus"), [("llama-3-8b", 64), ("mixtral-8x7b", 96)])
def test_rollcall_accepts_every_layout_of_a_plan(name: str, gpus: int) -> None:
    """The words of the submit line are read back as the layout that was planned."""
    choices = search.search(named(name), gpus, H100, Layout(batch=384))
    assert name == "llama-3-8b" or any(choice.layout.expert > 1 for choice in choices)
    for choice in choices:
        layout = plan._layout(parse(["gpt", *choice.words()])[1], gpus, H100)
        names = ("tensor", "stages", "context", "expert", "data", "zero", "shards")
        for part in (*names, "schedule", "chunks", "micro", "recompute"):
            assert getattr(layout, part) == getattr(choice.layout, part), choice.words()


def test_the_run_pays_for_its_failures() -> None:
    cost = run_cost.cost(LLAMA, 8.0, 512, run_cost.budget("1T"), 8, run_cost.FAILURES)
    assert cost.steps == -(-(10**12) // (512 * 8192))
    assert cost.between_failures == pytest.approx(86400 / 8 / 6.5e-3)
    assert 0.99 < cost.goodput < 1 and cost.whole > cost.busy == cost.steps * 8.0


def test_the_readmes_line_needs_no_torch() -> None:
    code = "import sys; from rollcall.cli.program import main; main(sys.argv[1:]);"
    code += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plan", *LINE, "--why", "--budget", "15T"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"
    assert "rollcall submit --nodes 8 --gpus-per-node 8" in output and "GPU-hours" in output


def test_json_terms_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*LINE, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert sum(first["terms"].values()) == pytest.approx(first["seconds"])
    assert sum(first["memory"].values()) == pytest.approx(first["bytes"])


def test_what_the_command_says_of_a_layout_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the line to submit, when it is planned again."""
    given = ["parallel.mesh=shard=rest,tensor=2", "data.micro_batch=2"]
    assert plan.main([*GPT, *given]) == 0
    table, _, line = capsys.readouterr().out.partition("Submit the first: rollcall submit ")
    rows = table.split("\n\n")[1].splitlines()[1:]
    assert [row.split()[1:3] for row in rows] == [["shard=4,tensor=2", "2"]]
    keys = [word for word in line.splitlines()[0].split() if "=" in word]
    planned = {"data.micro_batch=2", "parallel.mesh=shard=4,tensor=2", "parallel.strategy=zero3"}
    assert planned <= {*keys}
    assert plan.main([*GPT, *keys]) == 0
    assert capsys.readouterr().out.splitlines()[3] == table.splitlines()[3]


def test_selective_recomputation_and_compile_are_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = ["parallel.strategy=zero3", "data.micro_batch=1"]
    plans = {}
    for key in ("none", "selective", "blocks", "train.compile=true"):
        word = key if "=" in key else f"model.activation_checkpointing={key}"
        assert plan.main([*LINE, "--gpu", "h200", "--json", *keys, word]) == 0
        plans[key] = json.loads(capsys.readouterr().out)["layouts"][0]
    needed = [plans[key]["memory"]["activations"] for key in ("blocks", "selective", "none")]
    assert needed == sorted({*needed})
    moved = {key: found["terms"]["other operations"] for key, found in plans.items()}
    assert moved["train.compile=true"] < moved["none"] < moved["selective"]
    products = {key: found["terms"]["matrix products"] for key, found in plans.items()}
    assert products["none"] == products["selective"] < products["blocks"]
    assert "model.activation_checkpointing=selective" in plans["selective"]["words"]


def test_a_shape_takes_the_keys_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All but those of the model; so do the keys that mean the same as options."""
    keys = ["parallel.strategy=zero2", "parallel.reduce_scatter=micro-batch", "train.steps=9"]
    same = ["data.global_batch=64", "data.seq_len=4096", "precision=fp16"]
    options = ["--batch", "64", "--length", "4096", "--precision", "fp16"]
    plans = []
    for words in (same, options):
        assert plan.main([*LINE, *keys, *words]) == 0
        plans.append(capsys.readouterr().out.partition("Submit")[0])
    assert plans[0] == plans[1] and "64 samples of 4,096 tokens a step, fp16" in plans[0]


def test_a_chip_is_found_by_the_name_that_torch_reports() -> None:
    machines = Machines()
    names = {"a100": "A100", "A100-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100-40GB"}
    names |= {"NVIDIA H100 80GB HBM3": "H100", "h200-141gb": "H200", "gb200": "GB200"}
    names |= {"NVIDIA GH200 480GB": "GH200", "Tesla V100-SXM2-16GB": "V100-16GB"}
    names |= {"NVIDIA L40S": "L40S", "AMD Instinct MI300X VF": "MI300X"}
    assert {name: machines.chip(name).name for name in names} == names


def test_nodes_that_share_links_and_odd_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["llama-3-8b", "--gpus", "64", "--gpu", "gb200"]) == 0
    assert "submit --nodes 16 --gpus-per-node 4" in capsys.readouterr().out
    assert plan.main(["llama-3-8b", "--gpus", "7", "--gpu", "h100"]) == 0
    assert "shard=7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        *("chips: 3", "just", "factors: {a: 1}", "fabrics: {efa: 3}", "{"),
        *(
            "chips: {H100: {node: 0.5}}",
            "chips: {H100: {}, H100: {}}",
            "software: {rollcall: {passes: much}}",
            "software: {rollcall: {fused: no}}",
            "software: {rollcall: {fabric: 3}}",
            "chips: {H100: {memmory: 9}}",
            "fabrics: {efa: {hop: -1}}",
        ),
    ],
)
def test_wrong_machines_are_refused(text: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    assert plan.main([*LINE, "--machines", str(own), "--fabric", "efa"]) == 2


def test_a_file_of_machines_replaces_only_what_it_names(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("software: {rollcall: {host: 9}}\nfabrics: {RoCE: {hop: 2e1}}")
    changed = Machines(str(own)).software("rollcall", fabric="RoCE")
    assert (changed.host, changed.hop) == pytest.approx((9e-3, 2e-5))
    assert changed.autocast and changed.whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama-3-8b", "--gpus", "8", "--gpu", "h1000"], "unknown chip 'h1000', did you mean"),
        (["lama-3-8b"], "unknown model 'lama-3-8b', did you mean 'llama-3-8b'?"),
        (["llama-3-8c", "--gpus", "8", "--gpu", "h100"], "did you mean 'llama-3-8b'?"),
        ([*LINE, "--budget", "10"], "is less than the 4,194,304 tokens of one step"),
        ([*LINE, "--budget", "much"], "--budget much: expected a number of tokens or samples"),
        (["llama-3-8b", "--gpus", "63", "--gpu", "h100"], "such as 56 or 64"),
        (["llama-3-405b", "--gpus", "8", "--gpu", "h100"], "does not fit on 8 H100"),
        ([*LINE, "--gpus", "512", "--batch", "3"], "no mesh divides a batch of 3 samples"),
        ([*LINE, "--failures", "many"], "--failures many: expected a number from 0 to"),
        ([*LINE, "--precision", "fp4"], "precision: expected fp32, tf32, bf16, fp16 or fp8"),
        (["llama-3-8b"], "expected --gpu with the name of a chip"),
        ([*LINE, "--machines", "missing.yaml"], "--machines missing.yaml: No such file"),
        (["llama-3-8b", "--gpus", "8", "--gpu", "h"], "unknown chip 'h'"),
        (["llama-3-8b", "--gpus", "8", "--gpu", "h100-pcie"], "H100 PCIe cannot be planned"),
        ([*LINE, "--budget", "1e400"], "--budget 1e400: expected a number of tokens"),
        ([*LINE, "--price", "2"], "--price and --failures need --budget"),
        ([*LINE, "--ranks", "8"], "--ranks takes no --gpu"),
        (["gpt", "--gpu", "h100", "--length", "9"], "--length and --batch are for a shape"),
        (["mistral-8b", "--gpu", "h100"], "unknown model 'mistral-8b', did you mean 'mistral-7b'?"),
        ([*LINE, "model.hidden_size=8"], "model.hidden_size: llama-3-8b is the model"),
        ([*LINE, "parallel.compression=bf16"], "parallel.compression is not planned"),
        ([*LINE, "data.seq_len=0"], "data.seq_len 0: expected a whole number from 1"),
        ([*LINE, "parallel.mesh=tensor=16,shard=4"], "tensor=16 does not divide 8 key-value heads"),
        (
            [*LINE, "--batch", "8", "parallel.mesh=pipeline=8,shard=8"],
            "1f1b needs 8 micro-batches, but the batch makes 1",
        ),
        (
            ["mixtral-8x7b", "--gpus", "48", "--gpu", "h200", "parallel.mesh=shard=3,expert=16"],
            "expert=16 leaves a rank without any of 8 experts",
        ),
        (
            ["mixtral-8x7b", "--gpus", "24", "--gpu", "h200", "parallel.mesh=shard=3,expert=8"],
            "3 shards do not divide an expert's 4096 units",
        ),
        ([*LINE, "parallel.mesh=replicate=64"], "GB too much; use more GPUs"),
        ([*LINE, "--program", "megatorn"], "unknown program 'megatorn', did you mean 'megatron'?"),
        ([*LINE, "--imbalance", "0.5"], "--imbalance 0.5: expected a number from 1"),
        ([*LINE, "--calibrate", "no-run"], "--calibrate no-run: expected a number from 0.01"),
        ([*GPT, "parallel.mesh=tensor=3"], "parallel.mesh=tensor=3 needs 3 ranks, but got 8"),
        ([*LINE, "--nodes", "8"], "--gpus and --nodes say the same"),
        (["--validate", "missing"], "--validate missing: expected a folder with tables"),
        (["--validate", ""], "--validate : expected a folder with tables"),
        ([*LINE, "--gpus", "1e9"], "--gpus 1e9: expected a whole number from 1"),
        ([*LINE, "--top", "0"], "--top 0: expected a whole number from 1"),
        ([*LINE, "--budget", ""], "--budget : expected a number of tokens"),
        ([*LINE, "--budget", "1T", "--price", "-1"], "--price -1: expected a number from 0.01"),
        (
            ["digits", "--ranks", "100000000"],
            "--ranks 100000000: expected a whole number from 1 to 65,",
        ),
    ],
)
def test_wrong_words_get_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--failures" in words:
        words = [*words, "--budget", "15T"]
    assert plan.main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_run_stands_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measured run as --calibrate stretches other plans, and narrows their intervals."""
    config = "data: {name: synthetic_tokens, seq_len: 64, num_classes: 32, global_batch: 8, "
    config += "micro_batch: auto}"
    (tmp_path / "config.yaml").write_text(f"{config}\nmodel: {{name: gpt}}\n")
    words = [str(tmp_path), "--gpu", "a100", "--json"]
    run = RunDir(tmp_path.parent, tmp_path.name)
    for chip in ("Intel(R) Xeon(R) Processor", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        run.record("started", world_size=2, chip=chip)
        assert plan.main(words) == 2
        assert f"ran on {chip}" in capsys.readouterr().err
    LoggedStep(1, 1.0, 1.0, time.time()).append(tmp_path)
    run.record("started", world_size=1, chip="NVIDIA A100-SXM4-80GB")
    assert plan.main(words) == 2
    assert "no step has been logged" in capsys.readouterr().err
    LoggedStep(9, 1.0, 4.0, time.time()).append(tmp_path)
    assert plan.main([*words, "--gpus", "64"]) == 2
    assert "the plan of a run takes no --gpus" in capsys.readouterr().err
    assert plan.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == 2.0 > found["predicted"]
    assert found["factor"] == found["measured"] / found["predicted"]
    line = ["llama-3-8b", "--gpus", "64", "--gpu", "a100", "--json", "parallel.strategy=zero3"]
    assert plan.main(line) == plan.main([*line, "--calibrate", str(tmp_path)]) == 0
    plans = capsys.readouterr().out.replace("}\n{", "}\0{").split("\0")
    before, after = (json.loads(text)["layouts"][0] for text in plans)
    assert after["seconds"] == pytest.approx(before["seconds"] * found["factor"])
    spans = [one["margin"]["high"] / one["margin"]["low"] for one in (before, after)]
    assert spans[1] < spans[0]


KINDS = ["replicas", "sharded"]


def _table(folder: Path) -> None:
    """Rows that the planner itself would measure, two equal ones that differ, and a crash."""
    layout = Layout(data=8, zero=3, micro=1, batch=64, recompute="full")
    seconds = step_time.of(LLAMA, layout, Machines().machine("h100", "torchtitan")).total()
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
    row = dict.fromkeys(validate.COLUMNS.split(), "")
    row |= {key: str(value) for key, value in shape.items()}
    row |= {"table": "own", "model": "llama", "vocab": "128256", "gated": "1", "tied": "0"}
    row |= {"seq": "8192", "gpu": "H100-80GB", "gpus": "8", "gpus_per_node": "8", "dp": "8"}
    row |= {
        "precision": "bf16",
        "zero": "3",
        "sp": "1",
        "recompute": "full",
        "mbs": "1",
        "gbs": "64",
        "software": "torchtitan",
    }
    rows = [
        {**row, "step_time_s": str(seconds * 1.1), "status": "ok"},
        {**row, "mbs": "2", "step_time_s": "10", "status": "ok"},
        {**row, "mbs": "2", "step_time_s": "30", "status": "ok"},
        {**row, "zero": "0", "step_time_s": "", "status": "crashed_or_oom"},
    ]
    with (folder / "own.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_validation_finds_errors_crashes_and_contradictions(tmp_path: Path) -> None:
    _table(tmp_path)
    rows, left_out = validate.read(str(tmp_path), Machines())
    agreeing, reasons = validate.consistent(rows)
    assert not left_out and agreeing == [*rows[:2], rows[3]]
    assert reasons.total() == 1
    lines = validate.report(rows)
    assert [line["rows"] for line in lines] == ["all", "consistent", "held out", *KINDS]
    whole, sharded = lines[0], lines[-1]
    assert (whole["count"], sharded["count"], whole["left out"]) == (4, 2, reasons)
    alone = validate.errors(rows[:1], rows)
    assert alone["time"] == pytest.approx(1 - 1 / 1.1) and alone["inside"] == 1
    assert whole["recall"] == 1 and whole["alarms"] == 0


def test_rows_that_cannot_both_be_right_leave_out_the_slower_or_crashed(tmp_path: Path) -> None:
    """By measured values: slow micro-batches, stalls, crashes of what needs no more memory."""
    _table(tmp_path)
    one, two, _, crashed = validate.read(str(tmp_path), Machines())[0]
    assert one.seconds and one.layout.micro_batches == 2 * two.layout.micro_batches

    def left_out(*rows: validate.Row) -> list[validate.Row]:
        agreeing = validate.consistent(rows)[0]
        return [row for row in rows if row not in agreeing]

    assert not left_out(one, two._replace(seconds=one.seconds * 0.26))
    assert left_out(one, two._replace(seconds=one.seconds * 0.24)) == [one]
    stalled = one._replace(seconds=one.seconds * 50)
    assert left_out(stalled, crashed) == [stalled]
    assert not left_out(crashed, one)
    leaner = crashed._replace(layout=dataclasses.replace(crashed.layout, zero=3))
    assert left_out(leaner, one) == [leaner]


def test_a_table_is_known_by_its_rows(tmp_path: Path) -> None:
    """The name of a table does not matter to what the fit has seen."""
    shape = {"layers": "16", "hidden": "2048", "software": "nanotron"}
    for gpus, is_known in (("32", True), ("64", False)):
        rows, _ = validate.read(str(_saved(tmp_path, **shape, gpus=gpus)), Machines())
        assert {row.was_fitted for row in rows} == {is_known}


def test_nanotron_cannot_leave_a_stage_empty(tmp_path: Path) -> None:
    """With a large head, each of 16 layers counts as less than a stage of 16."""
    shape = {"layers": "16", "hidden": "2048", "ffn": "8192", "vocab": "131072", "kv_heads": "32"}
    for stages, runs in (("8", True), ("16", False)):
        folder = _saved(tmp_path, software="nanotron", pp=stages, gpus="32", gbs="256", **shape)
        assert (validate.read(str(folder), Machines())[0][0].predicted > 0) == runs


def _saved(folder: Path, **changed: str) -> Path:
    """Change the cells of all rows of the table."""
    _table(folder)
    lines = list(csv.DictReader((folder / "own.csv").read_text().splitlines()))
    with (folder / "own.csv").open("w") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows({**line, **changed} for line in lines)
    return folder


@pytest.mark.parametrize(
    ("column", "value"),
    [("step_time_s", "nan"), ("mem_gb", "0"), ("mem_gb", "x"), ("ffn", "1e400"), ("tp", "3")],
)
def test_rows_that_cannot_be_planned_are_left_out(
    column: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _table(tmp_path)
    lines = list(csv.DictReader((tmp_path / "own.csv").read_text().splitlines()))
    lines[0][column] = value
    with (tmp_path / "own.csv").open("w") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    rows, left_out = validate.read(str(tmp_path), Machines())
    assert len(rows) == 3 and left_out[0].startswith("own.csv, line 2: ")
    for text in (b"\xff", b"table,row\n", b"x" * 200_000 + b"\n1"):
        (tmp_path / "own.csv").write_bytes(text)
        assert plan.main(["--validate", str(tmp_path)]) == 2
        assert "--validate" in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_published_runs_are_what_the_docs_print(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of docs/plan.md give its table, and ten of the thirteen are in their range."""
    page = (ROOT / "docs" / "plan.md").read_text().partition("### Published runs")[2]
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \d+\. ", line)]
    commands = re.findall(r"rollcall plan (.+)", page.partition("```bash")[2].partition("```")[0])
    assert len(rows) == len(commands) == 13
    inside = 0
    for (_, step, planned, ratio, limits), command in zip(rows, commands, strict=True):
        assert plan.main([*command.split(), "--json"]) == 0
        first = json.loads(capsys.readouterr().out)["layouts"][0]
        low, high = (first["margin"][end] for end in ("low", "high"))
        published = float(step.removesuffix(" s"))
        assert float(planned.removesuffix(" s")) == pytest.approx(first["seconds"], rel=0.01)
        assert float(ratio) == pytest.approx(published / first["seconds"], rel=0.01)
        assert limits == f"{low:.2f}–{high:.2f} |"
        inside += low <= published / first["seconds"] <= high
        model, _, gpus, *_, batch = command.partition(" parallel.")[0].split()[:7]
        tokens = int(batch) * named(model).length / published / int(gpus)
        figures = re.findall(r"\d[\d,]*", shapes.KNOWN[model]["published"].replace("arxiv", ""))
        assert pytest.approx(tokens, rel=0.01) in [float(one.replace(",", "")) for one in figures]
    assert inside >= 10


def test_published_tables_are_as_wrong_as_the_docs_print() -> None:
    """No number is fitted to these tables; the range of mixtures is read off their rows."""
    rows, left_out = validate.read(str(Path(__file__).with_name("published")), Machines())
    assert not left_out
    groups: dict[str, list[validate.Row]] = {}
    for row in rows:
        name, has_experts = row.cells["table"], row.cells["arch"] == "moe"
        if name == "megatron-bridge":
            name += ", with experts" if has_experts else ", without experts"
        groups.setdefault(name, []).append(row)
    page = (ROOT / "docs" / "plan.md").read_text().partition("| median at first |")[2]
    printed = [line.strip("| ").split(" | ") for line in page.split("\n\n")[0].splitlines()[2:]]
    assert {cells[0] for cells in printed} == {*groups}
    for name, count, _, median, sign, inside in printed:
        errors = validate.errors(groups[name], groups[name])
        assert int(count) == len(groups[name])
        assert (median, sign) == (f"{errors['time']:.1%}", f"{errors['sign']:+.1%}")
        assert int(inside) == round(errors["inside"] * len(groups[name]))
    mixed = [row for row in rows if row.cells["arch"] == "moe"]
    alike = [(a, b) for a in mixed for b in mixed if a.key(*GROUP) == b.key(*GROUP) and a is not b]
    times = {"other": [1 / row.ratio for row in mixed]}
    times["calibrated"] = [a.ratio / b.ratio for a, b in alike]
    for kind, values in times.items():
        ends = [sorted(values)[math.ceil(part * len(values)) - 1] for part in (0.05, 0.95)]
        known = margins.KNOWN["kinds"]["mixture of experts"][kind]
        assert [round(end, 2) for end in ends] == known, kind
