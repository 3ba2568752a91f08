"""Call a model with the inputs of a batch, and take the outputs that a loss needs."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rollcall.config.schema import ConfigError
from rollcall.train.data.source import Batch


def outputs_of(model: nn.Module, batch: Batch) -> Any:
    """Return what the model makes of the inputs.

    A tuple is passed as arguments, a dictionary as named arguments. Of what a model of Hugging
    Face returns, the `logits` are taken.
    """
    places, names = arguments_of(batch)
    found = model(*places, **names)
    return found.logits if hasattr(found, "logits") else found


def arguments_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as arguments of the model: by place, and by name."""
    inputs = batch.inputs
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def check_arguments(model: nn.Module, batch: Batch) -> None:
    """Raise ConfigError if the forward method of a model does not take the inputs of a batch."""
    places, names = arguments_of(batch)
    try:
        inspect.signature(model.forward).bind(*places, **names)
    except TypeError as error:
        raise ConfigError(
            f"model.name: forward() of {type(model).__name__} does not take the inputs "
            f"{', '.join(names) or len(places)} of the samples (data.pad, data.pack): {error}"
        ) from None


def in_fp32(outputs: Any) -> Any:
    """Return outputs with numbers of 16 bits as fp32, in which losses are computed."""
    if isinstance(outputs, torch.Tensor):  # a tree's functions take ten times as long
        return outputs.float() if outputs.is_floating_point() else outputs
    return tree_map_only(
        torch.Tensor, lambda one: one.float() if one.is_floating_point() else one, outputs
    )


def one_input(batch: Batch, what: str) -> torch.Tensor:
    """Return the inputs, which must be one tensor.

    Raises:
        ConfigError: they are not; `what` needs that.
    """
    if isinstance(batch.inputs, torch.Tensor):
        return batch.inputs
    several = isinstance(batch.inputs, dict)
    found = f"the inputs {', '.join(batch.inputs)}" if several else "several inputs"
    raise ConfigError(
        f"{what} expects samples with one input, a tensor, got {found}; choose ddp, zero1, zero2, "
        "zero3 or tensor, or let the data set return (input, target)"
    )
