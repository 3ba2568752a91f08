"""Unmodified models of transformers: https://huggingface.co/docs/transformers.

They keep their class and the names of their weights. A model can start from a folder of weights
with `model.init`, and `rollcall checkpoint export --format hf` writes such a folder.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.text import did_you_mean
from rollcall.train.data.source import Source

STYLES = {"colwise": "columns", "rowwise": "rows"}
"""Of transformers' own plans; layers of other styles stay whole on each rank."""
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
        auto: the class of transformers that makes the model; the default is
            AutoModelForImageClassification for images, else AutoModelForCausalLM.
        lora: arguments of peft's LoraConfig, such as {r: 8, target_modules: [q_proj, v_proj]};
            then only the adapters are trained.
        options: values of the model's configuration, such as hidden_size=64.

    Raises:
        ConfigError: transformers is not installed, does not know a name, or the data does not fit.
    """
    library = _package("transformers", "model.name=transformers")
    is_image = len(source.shape) == 3
    auto = auto or ("AutoModelForImageClassification" if is_image else "AutoModelForCausalLM")
    make = getattr(library, auto, None)
    if make is None:
        raise ConfigError(
            f"model.args.auto={auto}: transformers {library.__version__} has no such class"
            f"{did_you_mean(auto, [name for name in dir(library) if name.startswith('AutoModel')])}"
        )
    config = _config(library, base, {**_of_data(base, source), **options})
    _check(config, source, base)
    with _refused(f"model.args.auto={auto} cannot make a {base}"):
        model: Any = make.from_config(config)
    model.register_forward_hook(_logits)
    _plan(model)
    if lora is not None:
        _adapt(model, lora)
    return model  # type: ignore[no-any-return]


def facts(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint says about a model of transformers: its config.json."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    adapter = getattr(model, "lora", None)
    more = {"adapter": adapter} if adapter else {}
    name = next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    return {"hugging_face": {**json.loads(config.to_json_string()), "architectures": [name]}} | more


def _package(name: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key} needs the package {name}, which cannot be imported ({error}): install it with "
            f"`pip install {name}`"
        ) from error


def _adapt(model: Any, options: Mapping[str, Any]) -> None:
    """Add adapters of peft to layers of a model, and freeze everything else."""
    peft = _package("peft", "model.args.lora")
    with _refused("model.args.lora"):
        config = peft.LoraConfig(**options)
        peft.inject_adapter_in_model(config, model)
    fields = {
        name: sorted(one) if isinstance(one, set) else one for name, one in config.to_dict().items()
    }
    # JSON, since checkpoints hold no objects.
    model.lora = json.loads(json.dumps(fields, default=lambda one: getattr(one, "value", str(one))))


def _config(library: Any, base: str, options: Mapping[str, Any]) -> Any:
    path, known = Path(base).expanduser(), library.CONFIG_MAPPING
    if not path.exists() and base not in known:
        raise ConfigError(
            f"model.args.base={base}: neither a file or folder here, nor a model type of "
            f"transformers {library.__version__}{did_you_mean(base, list(known))}"
        )
    with _refused(f"model.args.base={base}: no configuration of a model"):
        if path.exists():
            return library.AutoConfig.from_pretrained(path, use_cache=False, **options)
        return library.AutoConfig.for_model(base, use_cache=False, **options)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Refuse what these libraries refuse, with the first line of their reason."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{what}: {reason}") from error


def _of_data(base: str, source: Source) -> dict[str, Any]:
    """Return the values of a configuration that follow from the data."""
    if len(source.shape) == 3:
        given: dict[str, Any] = {"num_labels": source.classes} if source.classes else {}
        if not Path(base).expanduser().exists():
            given |= {"num_channels": source.shape[0], "image_size": source.shape[1]}
        return given
    is_known = Path(base).expanduser().exists() or not source.classes
    return {} if is_known else {"vocab_size": source.classes}


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
    """Declare how the layers are split for tensor parallelism, and what must divide."""
    own = {name: STYLES[style] for name, style in (model._tp_plan or {}).items() if style in STYLES}
    plan = own or PLANS.get(model.config.model_type)
    if plan:
        model.tensor_plan = plan
        heads = ("num_attention_heads", "num_key_value_heads")
        found = {name: getattr(model.config, name, None) for name in heads}
        model.tensor_divides = {name: number for name, number in found.items() if number}
