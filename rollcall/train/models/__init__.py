"""The models. Each is a file here and a line in `rollcall/config/catalog.py`."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rollcall.config import arguments
from rollcall.config.catalog import MODELS
from rollcall.config.mesh import parse
from rollcall.config.plugin import unknown
from rollcall.config.schema import Config, ConfigError, Model
from rollcall.train.data.source import Source
from rollcall.train.models import activations, batchnorm, vision
from rollcall.train.numerics import fp8
from rollcall.train.parallel.shard import units

TORCHVISION = "a classification model of torchvision such as resnet18 or vit_b_16"


def build(config: Model, source: Source) -> nn.Module:
    """Return the model that the configuration names, with sizes that fit the data."""
    is_short = ":" not in config.name and config.name not in MODELS
    if is_short and config.name not in vision.names():
        known = [*MODELS, *vision.names()]
        raise unknown("model.name", config.name, [*MODELS, TORCHVISION], known)
    sizes = {"vocab_size", "num_labels"} & config.args.keys()  # of a model of transformers
    if ":" not in config.name and not source.classes and not sizes:
        raise ConfigError(
            f"model.name={config.name} needs the number of classes: let the data function return a "
            "Source(train, validation, classes=…), or give the data set an attribute `classes`, "
            "their number or the list of their names; for model.name=transformers, "
            "model.args.vocab_size or model.args.num_labels is enough"
        )
    if is_short:
        if config.args:
            problem = f"model.args: model.name={config.name} takes no arguments here"
            raise ConfigError(f"{problem}; remove it, and use model.init for trained weights")
        return vision.vision(config, source)
    given = {"config": config, "source": source}
    model = arguments.call("model.name", "model.args", config.name, config.args, **given)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"model.name={config.name}: expected an nn.Module, got a {type(model).__name__}"
        )
    for name, weight in model.named_parameters():
        if is_lazy(weight):
            raise ConfigError(
                f"model.name={config.name}: {name} has no shape yet; give its module all sizes, or "
                "call the model once before you return it"
            )
    return model


def maker(config: Config, source: Source, device: torch.device) -> Callable[[], nn.Module]:
    """Return a function that builds and adapts the model of a run."""
    return lambda: adapt(build(config.model, source), config, device)


def slow_imports(name: str) -> tuple[str, ...]:
    """Return the slow modules that building a model imports, without importing them."""
    return () if ":" in name or name in MODELS else vision.SLOW_IMPORTS


def adapt(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Apply number format, recomputation, BatchNorm and layout before the model is spread."""
    if config.precision == "fp8":
        fp8.use(model)
    if config.model.sync_batchnorm:
        model = batchnorm.synchronize(model, device)
    if config.model.channels_last:
        _use_channels_last(model, config)
    activations.recompute(model, config.model.activation_checkpointing)
    return model


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each block of a spread model, or the whole model if it has no blocks."""
    every = list(units(model)) or [model]
    # An embedding, a norm or a head is one kernel; as a DTensor it does not compile alone (2.14).
    blocks = [block for block in every if any(True for _ in block.children())]
    for block in blocks or every:
        block.forward = torch.compile(block.forward, backend=backend)


def _use_channels_last(model: nn.Module, config: Config) -> None:
    sharded = "shard" in parse(config.parallel.mesh_text) and config.parallel.stage > 1
    if not sharded:  # FSDP2 needs contiguous weights (torch 2.15); convolutions follow their inputs
        model.to(memory_format=torch.channels_last)

    def convert_images(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs
        )

    model.register_forward_pre_hook(convert_images)
