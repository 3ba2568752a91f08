"""Llama 3, https://arxiv.org/abs/2407.21783: the transformer of gpt.py with a gated perceptron.

SwiGLU, https://arxiv.org/abs/2002.05202. It starts from a folder of Hugging Face with `model.init`,
and `rollcall checkpoint export --format hf` writes one.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data.source import Source
from rollcall.train.models.gpt import Block, Gpt, transformer

KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "tie_word_embeddings": "tied",
}
"""Keys of the section model by the names that a config.json uses."""
ALWAYS: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_type": ("default", "llama3"),
}
"""Values of a config.json that every Llama has."""


class Llama(Gpt):
    """An embedding, blocks, a norm and a linear layer."""

    tensor_plan: ClassVar = {
        **{name: cut for name, cut in Gpt.tensor_plan.items() if name[-3:] not in (".up", "own")},
        "block*.perceptron.gate": "columns",
        "block*.perceptron.up": "columns",
        "block*.perceptron.down": "rows",
    }
    sequence_plan: ClassVar = {
        **{name: cut for name, cut in Gpt.sequence_plan.items() if name != "block*.up"},
        "block*.perceptron": "gather for columns",
    }
    only_dropout_draws = True
    stored_names: ClassVar = {
        r"^block(\d+)\.": r"model.layers.\1.",
        r"^embedding\.": "model.embed_tokens.",
        r"^norm\.": "model.norm.",
        r"^head\.": "lm_head.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.perceptron_norm\.": ".post_attention_layernorm.",
        r"\.attention\.(q|k|v|o)[a-z]+\.": r".self_attn.\1_proj.",
        r"\.perceptron\.([a-z]+)\.": r".mlp.\1_proj.",
    }
    """Substitutions that turn a name of its tensors into Hugging Face's."""
    hugging_face: dict[str, Any]  # the config.json
    scaling: dict[str, float]  # of its positions

    def check_stored(self, folder: Path) -> None:
        """Raise ConfigError if the config.json of a folder of weights describes another model."""
        file = folder / "config.json"
        if not file.is_file():
            return
        stored = json.loads(file.read_text())
        # transformers 5 joins both in one.
        rope = stored.get("rope_parameters") or {**(stored.get("rope_scaling") or {})}
        stored["rope_theta"] = rope.pop("rope_theta", stored.get("rope_theta")) or 10_000.0
        stored["rope_type"] = rope.pop("rope_type", "default")
        stored["rope_scaling"] = rope
        heads = stored.get("num_attention_heads") or 1
        known = {**ALWAYS, "head_dim": (stored.get("hidden_size", 0) // heads,)}
        for key, values in known.items():
            if stored.get(key) not in (None, *values):
                raise ConfigError(
                    f"model.init={folder}: its config.json has {key}={json.dumps(stored[key])}, "
                    f"but a llama has {' or '.join(map(json.dumps, values))}: choose "
                    f"model.name=transformers model.args.base={folder}"
                )
        mine = {**self.hugging_face, "rope_scaling": self.scaling}
        wrong = [
            f"model.{ours}={json.dumps(stored[key])}"
            for key, ours in KEYS.items()
            if stored.get(key) not in (None, mine[key])
        ]
        if wrong:
            raise ConfigError(
                f"model.init={folder}: its config.json describes another model; set "
                f"{' '.join(wrong)}"
            )


class LlamaBlock(Block):
    """Attention and a gated perceptron, each with a norm before it and a residual connection."""

    def add_perceptron(self, hidden: int, width: int, config: Model) -> None:
        """Add the perceptron."""
        self.perceptron = Gated(hidden, width, config.dropout)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        """Map each token by itself."""
        out: torch.Tensor = self.perceptron(x)
        return out


class Gated(nn.Module):
    """Two layers side by side, of which one gates the other, and one that joins them."""

    def __init__(self, hidden: int, width: int, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, hidden) to the same shape."""
        out: torch.Tensor = self.down(self.dropout(functional.silu(self.gate(x)) * self.up(x)))
        return out


def llama(config: Model, source: Source) -> nn.Module:
    """Return a Llama for tokens: (rows, length) to (rows, length, classes) logits."""
    if config.experts:
        raise ConfigError("model.experts is a key of gpt: choose model.name=gpt, or remove it")
    model: Any = transformer(Llama, LlamaBlock, config, source)
    values = {key: getattr(config, ours) for key, ours in KEYS.items()}
    values["intermediate_size"] = config.ffn_size or 4 * config.hidden_size
    values["rms_norm_eps"] = config.norm_eps or torch.finfo(torch.float32).eps
    model.scaling = values.pop("rope_scaling")
    scaling = {"rope_type": "llama3", **model.scaling} if model.scaling else None
    model.hugging_face = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": source.classes,
        "max_position_embeddings": source.shape[0],
        "rope_scaling": scaling,
        **values,
    }
    return model  # type: ignore[no-any-return]
