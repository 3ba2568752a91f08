"""Call a model with the inputs of a batch, and take the outputs that a loss needs."""

import inspect
from typing import Any

import torch
from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.torch_private import tree_map_only


def outputs_of(model: nn.Module, batch: Batch) -> Any:
    """Return the model's outputs for the inputs: the `logits` of a model of Hugging Face.

    A tuple of inputs is passed as positional arguments, a dictionary as named arguments.
    """
    positional, named = arguments_of(batch)
    outputs = model(*positional, **named)
    return outputs.logits if hasattr(outputs, "logits") else outputs


def arguments_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as positional and named arguments of the model."""
    inputs = batch.inputs
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def check_arguments(model: nn.Module, batch: Batch) -> None:
    """Raise ConfigError if the forward method of a model does not take the inputs of a batch."""
    positional, named = arguments_of(batch)
    try:
        inspect.signature(model.forward).bind(*positional, **named)
    except TypeError as error:
        inputs = f"the inputs {', '.join(named)}" if named else f"{len(positional)} input(s)"
        raise ConfigError(
            f"model.name: forward() of {type(model).__name__} does not take {inputs} of the "
            f"samples (data.pad, data.pack): {error}; give other parameters a default"
        ) from None


def in_fp32(outputs: Any) -> Any:
    """Return outputs with 16-bit floats as fp32, in which losses are computed."""
    if isinstance(outputs, torch.Tensor):  # a tree's functions take ten times as long
        return outputs.float() if outputs.is_floating_point() else outputs
    return tree_map_only(torch.Tensor, in_fp32, outputs)


def one_input(batch: Batch, feature: str) -> torch.Tensor:
    """Return the inputs if they are one tensor.

    Raises:
        ConfigError: they are not, although this `feature`, such as a strategy, needs it.
    """
    if isinstance(batch.inputs, torch.Tensor):
        return batch.inputs
    is_named = isinstance(batch.inputs, dict)
    inputs = f"the inputs {', '.join(batch.inputs)}" if is_named else "several inputs"
    raise ConfigError(
        f"{feature} expects samples with one input, a tensor, got {inputs}; choose ddp, zero1, "
        "zero2, zero3 or tensor, or let the data set return (input, target)"
    )
