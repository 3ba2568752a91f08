"""The interface of a parallel dimension: how it spreads a model."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rollcall.config.schema import ConfigError
from rollcall.messages.refusal import RankError
from rollcall.train.data.source import Batch
from rollcall.train.numerics.losses import arguments_of

Fill = Callable[[nn.Module, torch.device, torch.device], None]
"""Gives the tensors of a model on the meta device values: weights and buffers on these devices."""
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class UnusedWeights(RuntimeError):
    """The loss of a step did not use all weights, and a part waits for all gradients."""


REENTRANT = "the model calls torch.utils.checkpoint with use_reentrant=True, which "
CAUSES = {
    "ready only once": REENTRANT
    + "DDP cannot do beside weights that the loss does not use or uses twice: call it with "
    "use_reentrant=False, or choose parallel.strategy=zero2",
    "Expected variable to have sparse gradient": "the loss also uses the weight of an embedding "
    "with sparse=True by other ways, which DDP cannot do: leave out sparse=True",
    "When use_reentrant=True": REENTRANT + "a pipeline cannot do: call it with use_reentrant=False",
    "torch.utils.checkpoint: ": "a block does not compute the same tensors when it is computed "
    "again: set model.activation_checkpointing=none ({first})",
    "modified by an inplace operation": "the model changes a tensor in place that the backward "
    "pass still needs, such as an input of a block that is computed again: make a new tensor "
    "instead ({cause})",
}
"""The causes of errors of a backward pass, by a part of torch's message."""


def explanation(error: BaseException) -> str:
    """Return the cause of an error of a backward pass in words; empty if it is not known."""
    cause = str(error.__cause__ or error).strip()  # a pipeline raises another one from it
    text = next((text for part, text in CAUSES.items() if part in cause), "")
    return text.replace("{first}", cause.partition("\n")[0]).replace("{cause}", cause)


def explain(error: BaseException) -> None:
    """Raise RankError for an error of a backward pass whose cause is known."""
    if text := explanation(error):
        raise RankError(text) from error


class Part:
    """How one dimension spreads a model. The methods are called in this order; all are optional."""

    shards = False  # whether `apply` and `wrap` shard weights, which need not have values yet
    rounds = False  # whether forward and backward passes get weights of 16 bits
    places = False  # whether `apply` moves the model to its devices; otherwise the strategy does
    warm_ups = 0  # backward passes that are needed before the first step
    finishes_alone = False  # whether `finish` is all that other ranks wait for after a failed pass
    changes_passes = True  # whether forward or backward passes differ from the plain model's
    suspicion = "a part that computes something else"  # if their results differ too

    def check(self, model: nn.Module, example: Batch) -> None:
        """Raise ConfigError if the model, whole on a CPU, or samples do not fit; say what does."""

    def apply(self, model: nn.Module) -> None:
        """Change this rank's part of the model in place; the names of the weights stay."""

    def keep_piece(self, model: nn.Module) -> None:
        """Keep this rank's piece of tensors other than weights; called once they have values."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what is called in place of the model, or of each pipeline stage of this rank."""
        return module

    def optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Return what makes the optimizer in place of `make`."""
        return make

    def share(self, batch: Batch) -> Batch:
        """Return this rank's piece of samples that it shares with other ranks."""
        return batch

    def around(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return a context for a forward and backward pass; the `last` one sends the gradients."""
        return nullcontext()

    def finish(self, model: nn.Module) -> bool | None:
        """Complete a step's gradients; True if they are NaN since some weights were unused."""

    def allow_unused(self, module: nn.Module) -> nn.Module:
        """Return what is called in place of what `wrap` returned: a step may leave weights out."""
        return module

    def finish_with_nan(self, model: nn.Module) -> bool:
        """Complete a failed pass with NaN on every rank; return whether that worked."""
        return self.finishes_alone and not self.finish(model)

    def forget(self) -> None:
        """Drop what a gradient that is not finite would carry over to the next step."""

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of whole samples, given this rank's piece of them."""
        return outputs


def check_arguments(model: nn.Module, batch: Batch) -> None:
    """Raise ConfigError if the forward method of a model does not take the inputs of a batch."""
    positional, named = arguments_of(batch.inputs)
    try:
        inspect.signature(model.forward).bind(*positional, **named)
    except TypeError as error:
        inputs = f"the inputs {', '.join(named)}" if named else f"{len(positional)} input(s)"
        raise ConfigError(
            f"model.name: forward() of {type(model).__name__} does not take {inputs} of the "
            f"samples (data.pad, data.pack): {error}; give other parameters a default"
        ) from None


def one_input(batch: Batch, feature: str) -> torch.Tensor:
    """Return the inputs; ConfigError unless they are one tensor, which this `feature` needs."""
    if isinstance(batch.inputs, torch.Tensor):
        return batch.inputs
    is_named = isinstance(batch.inputs, dict)
    inputs = f"the inputs {', '.join(batch.inputs)}" if is_named else "several inputs"
    raise ConfigError(
        f"{feature} expects samples with one input, a tensor, got {inputs}; choose ddp, zero1, "
        "zero2, zero3 or tensor, or let the data set return (input, target)"
    )


def nearest_multiples(number: int, degree: int) -> str:
    """Return the multiples of a degree below and above a number, for messages."""
    below = number // degree * degree
    return " or ".join(str(other) for other in (below, below + degree) if other)


@contextmanager
def evaluating(model: nn.Module, kind: type[nn.Module] = nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode, then back; `train()` would also train frozen ones."""
    modes = [(part, part.training) for part in model.modules() if isinstance(part, kind)]
    for module, _ in [(model, True)] if kind is nn.Module else modes:
        module.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def named_buffers(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return each buffer's name in the model, the module that has it, and its name there."""
    owners = [(name, module) for name, module in model.named_modules()]
    leaves = [(n, m, leaf) for n, m in owners for leaf, _ in m.named_buffers(recurse=False)]
    return [(f"{name}.{leaf}".lstrip("."), module, leaf) for name, module, leaf in leaves]


def flatten(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of tensors as one vector for each device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.reshape(-1))
    return [torch.cat(group) for group in groups.values()]


def unflatten(
    vectors: Iterable[torch.Tensor], like: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the values of the vectors in the shapes and layouts of the tensors they came from."""
    rest = {(vector.device, vector.dtype): vector for vector in vectors}
    for tensor in like:
        place = tensor.device, tensor.dtype
        part, rest[place] = rest[place].tensor_split([tensor.numel()])
        value = part.view(tensor.shape)
        yield value if tensor.is_contiguous() else torch.empty_like(tensor).copy_(value)
