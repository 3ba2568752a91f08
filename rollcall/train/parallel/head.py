"""The last layer of a model, which computes its scores and their loss together.

The scores of all tokens then never exist at once; see `numerics/cross_entropy.py`. The layer is
still called by the model, so that what parts have attached to it, such as FSDP's hooks, works.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rollcall.train.data.source import Batch
from rollcall.train.numerics import cross_entropy
from rollcall.train.numerics.losses import Loss, Scored, outputs_of
from rollcall.train.profiling.flops import META, Guesses, without_values


class Head:
    """The layer that a model names as `output_layer`."""

    def __init__(self, name: str, classes: int, loss: Loss) -> None:
        self.name, self._classes, self._loss = name, classes, loss
        self._batch: Batch | None = None  # whose targets the layer gets
        self._scored: Scored | None = None  # by the newest call of the layer

    def fits(self, batch: Batch) -> bool:
        """Return True if the batch has enough scores, and targets of a known shape."""
        targets = batch.targets
        is_known = isinstance(targets, torch.Tensor) and not targets.is_floating_point()
        return is_known and targets.numel() * self._classes > cross_entropy.CHUNK

    @contextmanager
    def scoring(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Let the layer, if this rank has it, compute losses of batches with the shape of this."""
        layer = model.get_submodule(self.name)
        if not isinstance(layer, nn.Linear):  # another stage of a pipeline has it
            yield
            return
        before = vars(layer).get("forward")
        self.begin(batch)
        vars(layer)["forward"] = lambda x: self._forward(layer, x)
        try:
            yield
        finally:
            del vars(layer)["forward"]
            if before:
                vars(layer)["forward"] = before
            self._batch = self._scored = None

    def begin(self, batch: Batch) -> None:
        """Let the next call of the layer compute the losses of this batch."""
        self._batch, self._scored = batch, None

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses; in an evaluation (rows, …, 2), the loss and hit of targets."""
        assert self._batch is not None
        if x.shape[:-1] != self._batch.targets.shape:
            return nn.Linear.forward(layer, x)  # which the loss refuses
        self._scored, hits = self._loss.of_layer(x, layer, self._batch)
        losses, total = self._scored
        out = total.view(1) if torch.is_grad_enabled() else torch.stack([losses, hits], -1)
        if isinstance(layer.weight, DTensor):  # the layer's hooks expect pieces of scores
            return DTensor.from_local(out, layer.weight.device_mesh, [Shard(-1)], run_check=False)
        return out

    def scored(self, outputs: Any) -> Any:
        """Return what the layer has computed in place of the model's outputs, if it has."""
        if self._scored is None:
            return outputs
        total = outputs.to_local() if isinstance(outputs, DTensor) else outputs
        found, self._scored = self._scored._replace(total=total.sum()), None
        return found


def find(model: nn.Module, example: Batch, loss: Loss) -> Head | None:
    """Return the head of a model that names one and returns its outputs as they are, or None."""
    name = getattr(model, "output_layer", None)
    if name is None or not loss.converts:
        return None
    seen: list[Any] = []
    with suppress(Exception), torch.no_grad(), Guesses():  # without values, code may raise anything
        bare = without_values(model)
        layer = bare.get_submodule(name)
        if type(layer) is nn.Linear:
            vars(layer)["forward"] = lambda x: _noted(nn.Linear.forward(layer, x), seen)
            outputs = outputs_of(bare, example.to(META))
            if len(seen) == 1 and outputs is seen[0]:
                return Head(name, layer.out_features, loss)
    return None


def _noted(output: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    seen.append(output)
    return output
