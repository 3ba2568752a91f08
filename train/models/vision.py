"""The classification models of torchvision: ResNets, ViTs and the others, for images of any size.

https://pytorch.org/vision/stable/models.html; imported only where one is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from train.data.source import Source
from train.schema import ConfigError, Model

SMALL = 64
"""Sides of images below this leave little after the first layers of a ResNet."""


def names() -> list[str]:
    """All of them, without weights."""
    from torchvision import models  # as slow to import as torch itself

    return list(models.list_models(module=models))


def vision(config: Model, source: Source) -> nn.Module:
    """The model of this name, for the size, channels and classes of the images.

    Images of up to 63 pixels go through a ResNet whose first layer is a 3×3 convolution without a
    stride (He et al., section 4.2, https://arxiv.org/abs/1512.03385), and into a ViT in patches so
    small that there are at least 7×7.

    Raises:
        ConfigError: the samples are no images, or too small for the model.
    """
    from torchvision import models

    if len(source.shape) != 3:
        raise ConfigError(
            f"model.name={config.name} needs images (channels, height, width), but the samples of "
            f"this data have shape {source.shape}: choose model.name=mlp"
        )
    options: dict[str, Any] = {"num_classes": source.classes, "weights": None}
    if config.name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    with torch.device("meta"):
        plan = models.get_model(config.name, **options)
    if isinstance(plan, models.VisionTransformer):
        model = _transformer(plan, config, source)
    else:
        model = models.get_model(config.name, **options)
        if isinstance(model, models.ResNet):
            _make_resnet_fit(model, max(source.shape[1:]) < SMALL)
    _take_channels(model, source.shape[0])
    _check(model, config, source)
    return model


def _make_resnet_fit(model: Any, small: bool) -> None:
    """A first layer for small images, and the layers by which a pipeline cuts any ResNet."""
    if small:
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    model.avgpool = nn.Sequential(model.avgpool, nn.Flatten())  # has no weights, so no names

    def pipeline_layers() -> dict[str, nn.Module]:
        names = ["conv1", "bn1", "relu", "maxpool"]
        for stack in ("layer1", "layer2", "layer3", "layer4"):
            names += [f"{stack}.{block}" for block, _ in getattr(model, stack).named_children()]
        return {name: model.get_submodule(name) for name in [*names, "avgpool", "fc"]}

    model.pipeline_layers = pipeline_layers


def _transformer(plan: Any, config: Model, source: Source) -> nn.Module:
    from torchvision.models import VisionTransformer

    _, height, width = source.shape
    fitting = [
        size
        for size in range(1, plan.patch_size + 1)
        if height % size == 0 and height // size >= min(7, height)
    ]
    if height != width:
        raise ConfigError(
            f"model.name={config.name} needs square images, not {height}×{width}: choose a "
            "convolutional model, such as resnet18"
        )
    model: nn.Module = VisionTransformer(
        height,
        max(fitting),
        num_layers=len(plan.encoder.layers),
        num_heads=plan.encoder.layers[0].num_heads,
        hidden_dim=plan.hidden_dim,
        mlp_dim=plan.mlp_dim,
        num_classes=source.classes,
    )
    return model


def _take_channels(model: nn.Module, channels: int) -> None:
    """Let the first convolution take images of so many channels."""
    name, first = next(
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)
    )
    if first.in_channels == channels:
        return
    parent, _, leaf = name.rpartition(".")
    replaced = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    setattr(model.get_submodule(parent), leaf, replaced)


def _check(model: nn.Module, config: Model, source: Source) -> None:
    """Try the shapes, with two images that have no numbers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    nowhere = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    images = torch.empty(2, *source.shape, device="meta")
    try:
        outputs = torch.func.functional_call(model, nowhere, (images,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"model.name={config.name} does not work on images of {source.shape[1]}×"
            f"{source.shape[2]}: {error}"
        ) from error
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"model.name={config.name} returns a {type(outputs).__name__}, and a loss needs one "
            "tensor of logits: choose another model"
        )
