"""The last layer of a model, which computes its scores and their loss together.

The scores of all tokens then never exist at once; see `numerics/cross_entropy.py`. The layer is
still called by the model, so that what parts have attached to it, such as FSDP's hooks, works.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from rollcall.train.data.source import Batch
from rollcall.train.numerics import cross_entropy
from rollcall.train.numerics.losses import Loss, Scored, outputs_of
from rollcall.train.profiling.flops import META, PassCounter, without_values
from rollcall.train.torch_private import replaced


class Head:
    """The layer that a model names as `output_layer`; no batch fits one without classes."""

    batch: Batch  # whose targets the layer gets next

    def __init__(self, name: str, classes: int, loss: Loss) -> None:
        self._name, self.classes, self._loss = name, classes, loss
        self.is_cut = False  # whether each rank has the scores of some classes
        self._scored: Scored | None = None  # by the newest call of the layer

    def fits(self, batch: Batch) -> bool:
        """Return True if the batch has enough scores."""
        count = batch.targets.numel() if isinstance(batch.targets, torch.Tensor) else 0
        return count * self.classes > (0 if self.is_cut else cross_entropy.CHUNK)

    @contextmanager
    def scoring(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Let the layer, if this rank has it, compute the losses of batches that fit."""
        layer: Any = model.get_submodule(self._name)
        self.batch, self._scored = batch, None
        call = partial(self._forward, layer)
        with replaced(layer, "forward", call) if isinstance(layer, nn.Linear) else nullcontext():
            yield
        self._scored = None

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses; in an evaluation (rows, …, 2), the loss and hit of targets."""
        if x.shape[:-1] != self.batch.targets.shape or self.batch.targets.is_floating_point():
            return nn.Linear.forward(layer, x)  # which the loss refuses
        self._scored, hits = self._loss.of_layer(x, layer, self.batch)
        losses, total = self._scored
        out = total.view(1) if torch.is_grad_enabled() else torch.stack([losses, hits], -1)
        if isinstance(layer.weight, DTensor):  # the layer's hooks expect pieces of scores
            return DTensor.from_local(out, layer.weight.device_mesh, [Shard(-1)], run_check=False)
        return out

    def scored(self, outputs: Any) -> Any:
        """Return the losses that the layer has computed, or else the outputs of the model."""
        if self._scored is None:
            return outputs
        total = outputs.to_local() if isinstance(outputs, DTensor) else outputs
        scored, self._scored = self._scored._replace(total=total.sum()), None
        return scored


def find(model: nn.Module, example: Batch, loss: Loss) -> Head:
    """Return the head of a model, with classes if the model returns its outputs unchanged."""
    name, seen = getattr(model, "output_layer", None) if loss.converts else None, list[Any]()
    outputs, plan = list[Any](), getattr(model, "tensor_plan", None) or {}
    is_by_rows = any(cut == "rows" and fnmatch(str(name), layer) for layer, cut in plan.items())
    if not name or is_by_rows:  # then tensor ranks have parts of the input, and of no class
        return Head("", 0, loss)
    with suppress(Exception), torch.no_grad():  # code may raise anything without values
        layer = (bare := without_values(model)).get_submodule(name)
        layer.register_forward_hook(lambda *call: seen.append(call[2]), prepend=True)
        with FlopCounterMode(display=False) as counter, PassCounter(counter) as passes:
            passes.watched = seen  # as a mask of some classes is written in place
            for is_training in (False, True):
                outputs.append(outputs_of(bare.train(is_training), example.to(META)))
        is_last = type(layer) is nn.Linear and [*map(id, outputs)] == [*map(id, seen)]
        is_last &= not passes.are_used
        return Head(name, layer.out_features if is_last else 0, loss)
    return Head("", 0, loss)
