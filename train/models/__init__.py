"""What is trained: one file per family, or `package.module:attribute` of the user's own."""

from __future__ import annotations

import torch
from torch import nn

from train import activations, fp8
from train.data.source import Source
from train.models import batchnorm, vision
from train.models.cnn import cnn
from train.models.gpt import gpt
from train.models.mlp import mlp
from train.parallel.mesh import parse
from train.parallel.shard import units
from train.plugin import load_attribute
from train.schema import Config, ConfigError, Model

FAMILIES = {"cnn": cnn, "gpt": gpt, "mlp": mlp}
OTHERS = [*FAMILIES, "a classification model of torchvision such as resnet18 or vit_b_16"]


def build(config: Model, source: Source) -> nn.Module:
    """The model that the configuration names, for the shape and classes of the data.

    A user's own attribute is called with (config, source) as the families here are.

    Raises:
        ConfigError: there is no such model.
    """
    family = FAMILIES.get(config.name)
    if family is None and ":" not in config.name and config.name in vision.names():
        family = vision.vision
    family = family or load_attribute(config.name, "model.name", OTHERS)
    model = family(config, source)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name: {config.name} returned {type(model).__name__}, not a Module"
        )
    return model


def adapt(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model as a step computes it: number formats, memory and BatchNorm as configured.

    The names of its weights stay. It is called before the model is spread over ranks.

    Raises:
        ConfigError: the model cannot be computed so.
    """
    if config.precision == "fp8":
        fp8.use(model)
    if config.model.sync_batchnorm:
        model = batchnorm.synchronize(model, device)
    if config.model.channels_last:
        _lay_out(model, config)
    activations.recompute(model, config.model.activation_checkpointing)
    return model


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each block of a model that is spread, or the whole if it has none."""
    for block in list(units(model)) or [model]:
        block.forward = torch.compile(block.forward, backend=backend)


def _lay_out(model: nn.Module, config: Config) -> None:
    """Let images, and weights of convolutions with them, lie in memory pixel by pixel."""
    sharded = "shard" in parse(config.parallel.mesh_text) and config.parallel.stage > 1
    if not sharded:  # FSDP2 wants weights row by row (torch 2.15); convolutions follow the images
        model.to(memory_format=torch.channels_last)

    def images_first(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs
        )

    model.register_forward_pre_hook(images_first)
