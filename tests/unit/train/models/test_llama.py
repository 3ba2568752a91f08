"""Llama: what transformers computes with the same weights, which come and go bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from rollcall.config import ConfigError, parse
from rollcall.records.run_dir import RunDir
from rollcall.train.checkpoint.tools.export import export, renamed
from rollcall.train.data import sets
from rollcall.train.data.source import Source
from rollcall.train.main import main
from rollcall.train.models import build
from rollcall.train.models.llama import Llama
from rollcall.train.ranks.world import World
from rollcall.train.weights import stored
from rollcall.train.weights.start import match

CLASSES, LENGTH = 67, 24
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # so that some waves are long, and some between
}
WORDS = [
    *("data.name=synthetic_tokens", f"data.num_classes={CLASSES}", f"data.seq_len={LENGTH}"),
    *("data.num_samples=16", "data.global_batch=4", "device=cpu", "model.name=llama"),
    *("model.hidden_size=64", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.ffn_size=96", "model.norm_eps=1e-5", "model.rope_theta=500.0"),
    "model.rope_scaling={" + ", ".join(f"{key}: {value}" for key, value in SCALING.items()) + "}",
]


def built(*words: str) -> Llama:
    config = parse([*WORDS, *words])[1]
    world = World.__new__(World)
    model = build(config.model, sets.load(config.data, world))
    assert isinstance(model, Llama)
    return model


def folder_of(tied: bool, path: Path) -> Any:
    """Save a model of transformers with random weights, and return it."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = library.LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        rope_scaling={"rope_type": "llama3", **SCALING},
        tie_word_embeddings=tied,
        max_position_embeddings=LENGTH,
    )
    model = library.LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # norms begin with 1
        torch.nn.init.normal_(weight, 0.5 if weight.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_hugging_face_comes_and_goes_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    """The logits equal those that transformers computes; the export has the same tensors."""
    theirs = folder_of(tied, tmp_path / "hf")
    words = [*WORDS, f"model.tied={str(tied).lower()}", f"model.init={tmp_path / 'hf'}"]
    config = parse(words)[1]
    ours = built(*words).eval()
    source = stored.open_(str(tmp_path / "hf"))
    names = match(ours, source.shapes, config)
    source.fill({names[name]: weight.data for name, weight in ours.named_parameters()})
    tokens = torch.randint(CLASSES, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)

    # A run of one step that changes nothing.
    frozen = ["train.steps=1", "optim.lr=1e-30", "optim.name=sgd", f"run.root={tmp_path}"]
    assert main([*words, *frozen, "run.name=run", "checkpoint.every=1"]) == 0
    checkpoint = max(RunDir(tmp_path, "run").checkpoints.iterdir())
    export(checkpoint, tmp_path / "again", "hf")
    library: Any = pytest.importorskip("transformers")
    again = library.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert type(again).__name__ == "LlamaForCausalLM"
    weights = again.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    assert all(torch.equal(weights[name], one) for name, one in theirs.state_dict().items())
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, expected)
    before, after = (stored.open_(str(tmp_path / name)).shapes for name in ("hf", "again"))
    assert before == after


def test_a_folder_of_another_model_is_refused_with_the_keys_to_set(tmp_path: Path) -> None:
    folder_of(False, tmp_path / "hf")
    words = ["model.num_heads=8", "model.rope_theta=10000", "model.rope_scaling={}"]
    with pytest.raises(ConfigError) as error:
        built(*words).check_stored(tmp_path / "hf")
    said = str(error.value)
    assert said.startswith(f"model.init={tmp_path / 'hf'}: its config.json describes another model")
    wanted = "set model.num_heads=4 model.rope_theta=500.0 model.rope_scaling={"
    assert wanted in said
    assert "hidden_size" not in said


def test_names_are_those_of_transformers() -> None:
    names = {renamed(name, Llama.stored_names) for name, _ in built().named_parameters()}
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"model.layers.{number}.{name}" for number in range(3) for name in layer}
    expected |= {"model.embed_tokens", "model.norm", "lm_head"}
    assert names == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize(
    ("size", "weights"),  # as https://huggingface.co/meta-llama counts them
    [
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_sizes_have_their_published_weights(size: str, weights: int) -> None:
    plain = [word for word in WORDS if not word.startswith("model.")]
    config = parse([*plain, "model.name=llama", f"model.size={size}"])[1]
    with torch.device("meta"):
        nothing = TensorDataset()
        model = build(config.model, Source(nothing, nothing, 1, 1, shape=(8,), classes=128_256))
    assert sum(weight.numel() for weight in model.parameters()) == weights
    larger = parse([*plain, f"model.size={size}", "model.num_layers=2", "model.tied=false"])[1]
    assert larger.model.num_layers == 2 and not larger.model.tied
    assert larger.model.hidden_size == config.model.hidden_size


def test_a_scaling_without_all_its_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the keys factor, low_freq_factor, high_freq"):
        built("model.rope_scaling={factor: 8}")


@pytest.mark.parametrize(
    ("stored_values", "message"),
    [
        ({"model_type": "gemma"}, 'has model_type="gemma", but a llama has "llama": choose'),
        ({"hidden_act": "gelu"}, 'has hidden_act="gelu"'),
        ({"attention_bias": True}, "has attention_bias=true"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 'has rope_type="linear"'),
        ({"head_dim": 32, "hidden_size": 64, "num_attention_heads": 4}, "has head_dim=32"),
    ],
)
def test_a_folder_of_another_architecture_is_refused(
    stored_values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stored_values))
    with pytest.raises(ConfigError, match=re.escape(message)):
        built().check_stored(tmp_path)
