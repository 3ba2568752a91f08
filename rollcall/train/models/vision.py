"""The models of https://pytorch.org/vision/stable/models.html, which are imported late."""

from typing import Any

import torch
from torch import nn

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data.source import Source

SLOW_IMPORTS = ("torchvision.models",)
"""Modules that are imported late, because they are as slow to import as torch."""
SMALL_IMAGE = 64
"""Images with fewer pixels in height and width get a ResNet whose first layers keep their size."""


def names() -> list[str]:
    """Return the names of all models."""
    from torchvision import models

    return list(models.list_models(module=models))


def vision(config: Model, source: Source) -> nn.Module:
    """Return a model without pretrained weights, for the size, channels and classes of the images.

    For images below 64 pixels, the first layer of a ResNet is a 3×3 convolution without a stride
    (He et al., section 4.2, https://arxiv.org/abs/1512.03385). The patches of a ViT are small
    enough to make at least 7×7 of them.
    """
    from torchvision import models

    if len(source.shape) != 3:
        raise ConfigError(
            f"model.name={config.name} expects images (channels, height, width), got samples of "
            f"shape {source.shape}; choose model.name=mlp"
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
            _adapt_resnet(model, max(source.shape[1:]) < SMALL_IMAGE)
    _take_channels(model, source.shape[0])
    _check(model, config, source)
    return model


def _adapt_resnet(model: Any, small: bool) -> None:
    """Replace the first layers for small images, and declare the layers for a pipeline."""
    if small:
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    # The pooling has no weights, so no name of a weight changes.
    model.avgpool = nn.Sequential(model.avgpool, nn.Flatten())

    def pipeline_layers() -> dict[str, nn.Module]:
        names = ["conv1", "bn1", "relu", "maxpool"]
        for stack in ("layer1", "layer2", "layer3", "layer4"):
            names += [f"{stack}.{block}" for block, _ in getattr(model, stack).named_children()]
        return {name: model.get_submodule(name) for name in [*names, "avgpool", "fc"]}

    model.pipeline_layers = pipeline_layers


def _transformer(plan: Any, config: Model, source: Source) -> nn.Module:
    from torchvision.models import VisionTransformer

    _, height, width = source.shape
    sizes = range(1, plan.patch_size + 1)
    fitting = [size for size in sizes if not height % size and height // size >= min(7, height)]
    if height != width:
        raise ConfigError(
            f"model.name={config.name} expects square images, got {height}×{width}; choose a "
            "convolutional model such as resnet18"
        )
    return VisionTransformer(  # type: ignore[no-any-return]
        height,
        max(fitting),
        num_layers=len(plan.encoder.layers),
        num_heads=plan.encoder.layers[0].num_heads,
        hidden_dim=plan.hidden_dim,
        mlp_dim=plan.mlp_dim,
        num_classes=source.classes,
    )


def _take_channels(model: nn.Module, channels: int) -> None:
    modules: Any = model.named_modules()
    name, first = next(pair for pair in modules if isinstance(pair[1], nn.Conv2d))
    if first.in_channels != channels:
        sizes = first.kernel_size, first.stride, first.padding
        first = nn.Conv2d(channels, first.out_channels, *sizes, bias=first.bias is not None)
        model.set_submodule(name, first)


def _check(model: nn.Module, config: Model, source: Source) -> None:
    """Compute the shapes for two images, on the meta device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    images = torch.empty(2, *source.shape, device="meta")
    try:
        outputs = torch.func.functional_call(model, on_meta, (images,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"model.name={config.name} does not work on images of {source.shape[1]}×"
            f"{source.shape[2]}: {error}"
        ) from error
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"model.name={config.name}: expected one tensor of logits, got a "
            f"{type(outputs).__name__}; choose another model"
        )
