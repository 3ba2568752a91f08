"""Unmodified models of transformers: https://huggingface.co/docs/transformers.

They keep their class and the names of their weights. A model can start from a folder of weights
with `model.init`, and `rollcall checkpoint export --format hf` writes such a folder.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.messages.text import did_you_mean
from rollcall.train.data.source import Source
from rollcall.train.data.tokenizer import package, refused

EXPERT_INPUTS = ["top_k_index", "top_k_weights"], ["router_indices", "routing_weights"]
"""Arguments of modules that have a stack of experts, after `self` and the tokens."""
PLAN_STYLES = {"colwise": "columns", "rowwise": "rows"}
"""Styles in the plans of transformers; layers of other styles stay whole on each rank."""
PLANS = {
    "bert": {
        "*.attention.self.query": "columns",
        "*.attention.self.key": "columns",
        "*.attention.self.value": "columns",
        "*.layer.*.output.dense": "rows",
        "*.intermediate.dense": "columns",
    },
    "vit": {
        "*.attention.q_proj": "columns",
        "*.attention.k_proj": "columns",
        "*.attention.v_proj": "columns",
        "*.attention.o_proj": "rows",
        "*.mlp.fc1": "columns",
        "*.mlp.fc2": "rows",
    },
}
"""Plans for tensor parallelism of model types whose classes have none."""


def transformers(
    source: Source, base: str, auto: str = "", lora: dict[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Return a model of transformers that maps token numbers or images to logits.

    Args:
        source: the data set.
        base: a model type such as llama, a config.json, or a folder that holds one.
        auto: the class of transformers that makes the model; by default
            AutoModelForImageClassification for images, otherwise AutoModelForCausalLM.
        lora: arguments of peft's LoraConfig, such as {r: 8, target_modules: [q_proj, v_proj]};
            with them, only the adapters are trained.
        options: values of the model's configuration, such as hidden_size=64.

    Raises:
        ConfigError: transformers is not installed, does not know a name, or the data does not fit.
    """
    library = package("transformers", "model.name=transformers")
    is_image = len(source.shape) == 3
    auto = auto or ("AutoModelForImageClassification" if is_image else "AutoModelForCausalLM")
    if (make := getattr(library, auto, None)) is None:
        raise ConfigError(
            f"model.args.auto={auto}: transformers {library.__version__} has no such class"
            f"{did_you_mean(auto, [name for name in dir(library) if name.startswith('AutoModel')])}"
        )
    config = _config(library, base, {**_of_data(base, source), **options})
    _check(config, source, base)
    with refused(f"model.args.auto={auto} cannot make a {base}"):
        model: Any = make.from_config(config)
    model.register_forward_hook(_logits)
    _plan(model)
    if lora is not None:
        _adapt(model, lora)
    return model  # type: ignore[no-any-return]


def facts(model: nn.Module) -> dict[str, Any]:
    """Return the facts about a model of transformers for a checkpoint: its config.json."""
    made: Any = model
    if hasattr(made, "hugging_face"):  # a model of rollcall's
        return {"hugging_face": made.hugging_face, "hugging_face_names": {**made.stored_names}}
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    name = next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    changed: dict[str, Any] = {"architectures": [name], "use_cache": True}  # for those who generate
    facts: dict[str, Any] = {"hugging_face": json.loads(config.to_json_string()) | changed}
    adapter = getattr(model, "lora", None)
    return {**facts, "adapter": adapter} if adapter else facts


def _adapt(model: Any, options: Mapping[str, Any]) -> None:
    """Add adapters of peft to layers of a model, and freeze everything else."""
    peft = package("peft", "model.args.lora")
    with refused("model.args.lora"):
        config = peft.LoraConfig(**options)
        peft.inject_adapter_in_model(config, model)

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))

    # As JSON, since checkpoints hold no objects.
    model.lora = json.loads(json.dumps(config.to_dict(), default=plain))


def _config(library: Any, base: str, options: Mapping[str, Any]) -> Any:
    path, known = Path(base).expanduser(), library.CONFIG_MAPPING
    if not path.exists() and base not in known:
        raise ConfigError(
            f"model.args.base={base}: neither a file or folder here, nor a model type of "
            f"transformers {library.__version__}{did_you_mean(base, list(known))}"
        )
    with refused(f"model.args.base={base}: no configuration of a model"):
        if path.exists():
            return library.AutoConfig.from_pretrained(path, use_cache=False, **options)
        return library.AutoConfig.for_model(base, use_cache=False, **options)


def _of_data(base: str, source: Source) -> dict[str, Any]:
    has_sizes = Path(base).expanduser().exists()
    if len(source.shape) == 3:
        options: dict[str, Any] = {"num_labels": source.classes} if source.classes else {}
        if not has_sizes:
            options |= {"num_channels": source.shape[0], "image_size": source.shape[1]}
        return options
    return {} if has_sizes or not source.classes else {"vocab_size": source.classes}


def _check(config: Any, source: Source, base: str) -> None:
    size, words = getattr(config, "image_size", None), getattr(config, "vocab_size", None)
    if len(source.shape) == 3 and size not in (None, source.shape[1]):
        raise ConfigError(
            f"model.args.base={base} expects images of {size}×{size}, got {source.shape[1]}×"
            f"{source.shape[2]}; set data.image_size={size}, or model.args.image_size"
        )
    if len(source.shape) == 1 and words is not None and words < source.classes:
        raise ConfigError(
            f"model.args.base={base} knows {words} tokens, but the data has {source.classes}; "
            "encode the data with the tokenizer of the model"
        )


def _logits(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return the logits alone, unless the model was given labels."""
    has_loss = getattr(outputs, "loss", None) is not None
    return outputs if has_loss else getattr(outputs, "logits", outputs)


def _plan(model: Any) -> None:
    """Declare the layers that are cut, the sizes that must divide, and what is gathered alone."""
    model.shard_units = [*_ends(model)]
    model.output_layer = next(reversed(model.shard_units), None)
    styles = (model._tp_plan or {}).items()
    plan = {name: PLAN_STYLES[style] for name, style in styles if style in PLAN_STYLES}
    plan = plan or PLANS.get(model.config.model_type, {})
    if plan:
        model.tensor_plan = plan
        heads = ("num_attention_heads", "num_key_value_heads")
        counts = {name: getattr(model.config, name, None) for name in heads}
        model.tensor_divides = {name: count for name, count in counts.items() if count}
    # Before version 5, the second kind had a weight for each expert.
    version = int(package("transformers", "model.name=transformers").__version__.split(".")[0])
    known = EXPERT_INPUTS if version >= 5 else EXPERT_INPUTS[:1]
    takes = {n: inspect.signature(type(m).forward).parameters for n, m in model.named_modules()}
    model.expert_plan = [name for name, given in takes.items() if [*given][2:4] in known]


def _ends(model: Any) -> Iterator[str]:
    """Yield the names of the embedding and the head, which are large and lie outside the blocks."""
    names = {module: name for name, module in model.named_modules()}
    for end in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(AttributeError, NotImplementedError):  # models of images have none
            module = getattr(model, end)()
            if module in names and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                yield names[module]
