"""Find where a number first stopped being finite, with hooks on every module for one step."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from rollcall.train.numerics.losses import Objective
from rollcall.train.torch_private import tree_leaves

FORWARD, LOSS, BACKWARD, NOWHERE = range(4)


class Finding(NamedTuple):
    """The module in which one rank first saw a number that is not finite."""

    stage: int = NOWHERE  # the part of the step
    place: str = "an unknown place, because the repeated step was finite"
    rows: tuple[int, ...] = ()  # this rank's rows whose loss is not finite


class Witness:
    """Watches the modules of a model and the losses of an objective while its context is open."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self._model, self._objective = model, objective
        self.losses = torch.zeros(0)  # (rows,), after the context; none if not computed here
        self._handles: list[Any] = []
        self._forward = self._backward = ""

    def __enter__(self) -> "Witness":
        self._objective.seen = []
        for name, module in self._model.named_modules():
            hook = partial(self._after, f"module {name}" if name else "the model")
            self._handles.append(module.register_forward_hook(hook))
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:  # sees the gradient before the ranks sum it
                hook = partial(self._gradient, f"the gradient of {name}")
                self._handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        seen, self._objective.seen = self._objective.seen or [], None
        self.losses = torch.cat(seen) if seen else torch.zeros(0)

    def finding(self) -> "Finding":
        """Return the first sighting, after the context was closed."""
        rows = tuple((~self.losses.isfinite()).nonzero().flatten().tolist())
        seen = (FORWARD, self._forward), (LOSS, "the loss" * bool(rows)), (BACKWARD, self._backward)
        return next((Finding(stage, place, rows) for stage, place in seen if place), Finding())

    def largest(self, count: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest loss, and the rows with the `count` largest losses."""
        if not len(self.losses):
            return -torch.inf, ()
        found = self.losses.topk(min(count, len(self.losses)))
        return float(found.values[0]), tuple(found.indices.tolist())

    def _after(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        floats = (t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
        for tensor in filter(torch.is_floating_point, floats):
            if not self._forward and not tensor.detach().isfinite().all():
                self._forward = f"the output of {name}"
            if tensor.requires_grad:
                hook = partial(self._gradient, f"the gradient of the output of {name}")
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, place: str, gradient: torch.Tensor) -> None:
        if not self._backward and not gradient.isfinite().all():
            self._backward = place
