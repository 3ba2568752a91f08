"""Shapes of models by name, or from the config.json of a Hugging Face model. No torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcall.config import yaml_values
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean
from rollcall.tools.plan.model import Model, transformer

FOLDER = Path(__file__).parent
KNOWN: dict[str, dict[str, Any]] = yaml_values.load((FOLDER / "models.yaml").read_text())
NAMES = {name: entry for entry in KNOWN for name in (entry, *KNOWN[entry].get("also", ()))}


def find(word: str) -> str | None:
    """Return the entry of a common name, such as meta-llama/Llama-3.1-8B-Instruct."""
    return {_key(name): entry for name, entry in NAMES.items()}.get(_key(word))


def near(word: str) -> str:
    """Return the end of a refusal that names the nearest shape; empty if none is near."""
    return did_you_mean(word.lower(), NAMES)


def _key(word: str) -> str:
    word = re.sub(r"-(hf|base|instruct|chat|it|v0\.\d)\b", "", word.lower().rpartition("/")[2])
    return re.sub(r"[-_. ]", "", word)


def named(name: str, length: int | None = None) -> Model:
    """Return a model of models.yaml as rollcall spreads it; `length` replaces its own."""
    shape = find(name) or name
    values = {k: v for k, v in KNOWN[shape].items() if k not in ("source", "also", "published")}
    return transformer(shape, **{**values, "length": length or values["length"]})


def from_file(path: str, length: int | None = None) -> Model:
    """Return the model of a config.json of Hugging Face, or of the folder that holds it.

    Raises:
        RefusedError: the file cannot be read, or is not of a decoder-only transformer.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    rules: dict[str, Any] = yaml_values.load((FOLDER / "huggingface.yaml").read_text())
    try:
        config = json.loads(file.read_text())
        config = {**config, **config.get("text_config", {})}
        if other := next((key for key in rules["refused"] if config.get(key)), ""):
            raise ValueError(f"{other} is of another kind of model")
        values = _values(config, rules)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RefusedError(
            f"--shape {path}: expected the config.json of a decoder-only transformer of Hugging "
            f"Face: {why}; other models are planned from a recipe"
        ) from None
    values["length"] = length or values["length"]
    return transformer(file.absolute().parent.name, **values)


def _values(config: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `transformer`; ValueError if some are missing."""
    values: dict[str, Any] = {}
    for name, keys in rules["keys"].items():
        numbers = [config[key] for key in keys if isinstance(config.get(key), int)]
        values[name] = int(numbers[0]) if numbers else 0
    for name in ("layers", "hidden", "heads", "vocab"):
        if values[name] < 1:
            raise ValueError(f"no {' or '.join(rules['keys'][name])}")
    kind = config.get("model_type")
    values["ffn"] = values["ffn"] or 4 * values["hidden"]
    is_shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    values["kv_heads"] = 1 if is_shared else values["kv_heads"] or values["heads"]
    values["length"] = min(values["length"] or 8192, 8192)  # the file has the positions' limit
    values["gated"] = kind not in rules["not gated"]
    values["tied"] = bool(config.get("tie_word_embeddings", kind in rules["tied"]))
    nope, shared, every = (values.pop(key) for key in ("nope_dim", "shared_experts", "every"))
    if values["kv_rank"]:
        values["head_dim"] = nope + values["rope_dim"]
    size = values["expert_ffn"] = values["expert_ffn"] or values["ffn"]
    values["shared_ffn"] = values["shared_ffn"] or (shared or rules["shared"].get(kind, 0)) * size
    dense = max(values["dense_layers"], len(config.get("mlp_only_layers") or ()))
    values["dense_layers"] = dense or values["layers"] - values["layers"] // (every or 1)
    return values
