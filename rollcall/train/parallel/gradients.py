"""Clip gradients to a global norm, on any mesh."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rollcall.config.schema import ConfigError
from rollcall.messages.text import listed
from rollcall.train.data.source import Batch
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.numerics.losses import Loss
from rollcall.train.parallel.part import Part, flatten, unflatten
from rollcall.train.ranks.device import local_of
from rollcall.train.torch_private import norms

# To gather a tensor over two dimensions takes two messages, for which torch asks to flatten a mesh.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by mesh, device and format; torch has no operations over several."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[mesh, parameter.device, parameter.dtype].append(parameter)
    return list(groups.values())


def clip(
    groups: Sequence[Sequence[nn.Parameter]],  # all weights, as `by_mesh` groups them
    max_norm: float | None,  # None only measures the norm
    pipeline: dist.ProcessGroup | None,  # ranks that hold other layers, if any
    divisor: torch.Tensor | None = None,  # divides the gradients first, as fp16 needs
) -> torch.Tensor:
    """Scale the gradients to at most this norm over all ranks; return the norm before, exact."""
    gradients = [[one.grad for one in group if one.grad is not None] for group in groups]
    norms = [_norm(group) for group in gradients if group]
    norms = norms or [groups[0][0].new_zeros(())]  # all weights of this pipeline stage are frozen
    norms = [norm.to(norms[0].device) for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        square = norm.double().square()  # stages may have weights of different types
        dist.all_reduce(square, group=pipeline)
        norm = square.sqrt().float()
    if max_norm is None and divisor is None:
        return norm
    divisor = torch.ones_like(norm) if divisor is None else divisor.to(norm.device)
    norm = norm / divisor
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)
    scale = scale / divisor
    for group in filter(None, gradients):
        scale = scale.to(group[0].device)
        for gradient in group:
            local_of(gradient).mul_(scale)
    return norm


def sum_gradients(
    weights: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup | None], share: float
) -> None:
    """Sum a share of gradients of weights that all ranks hold whole; None where no rank has one."""
    weights = [weight for weight in weights if weight.requires_grad]
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    uses = [weight.new_full((), weight.grad is not None) for weight in weights]
    vectors = [vector * share for vector in flatten([*gradients, *uses])]
    for vector in vectors:
        for group in groups:
            dist.all_reduce(vector, group=group)
    sums = list(unflatten(vectors, [*gradients, *uses]))
    for number, weight in enumerate(weights):  # a GPU is waited for only if one is unused here
        is_used = weight.grad is not None or bool(sums[len(weights) + number])
        weight.grad = sums[number] if is_used else None


class LossWeights(Part):
    """The weights of a loss, which all ranks hold whole."""

    changes_passes = False
    finishes_alone = True

    def __init__(self, weights: Sequence[nn.Parameter], share: float) -> None:
        self._weights, self._share = weights, share

    def finish(self, model: nn.Module) -> None:  # noqa: ARG002
        """Sum the gradients over all ranks."""
        sum_gradients(self._weights, [None], self._share)


class Turns(Part):
    """Networks that a loss trains in turn: a step leaves a gradient to the weights of one alone."""

    changes_passes = False

    def __init__(self, loss: Loss, share: float | None) -> None:
        """Multiply the sum of the ranks' gradients by `share`; None if another part adds them."""
        self._loss, self._share = loss, share
        self._model: nn.Module
        self._weights: dict[str, list[nn.Parameter]] = {}  # of each network, once they are placed

    def check(self, model: nn.Module, _example: Batch) -> None:
        """Refuse networks that do not exist, and weights that belong to none or to several."""
        networks = dict(model.named_children())
        if unknown := {*self._loss.turns} - {*networks}:
            raise ConfigError(
                f"train.loss={self._loss.name}: its turns name {listed(sorted(unknown))}, but the "
                f"parts of the model are {listed([*networks])}"
            )
        parts = [networks[turn] for turn in {*self._loss.turns}]
        owners = Counter(weight for part in parts for weight in part.parameters())
        for name, weight in model.named_parameters():
            if weight.requires_grad and owners[weight] != 1:
                raise ConfigError(
                    f"train.loss={self._loss.name} trains networks in turn, but {owners[weight]} "
                    f"of them have the weight {name}: put it into one of them, or freeze it with "
                    "model.freeze"
                )

    def apply(self, model: nn.Module) -> None:
        """Remember the model, whose weights may be replaced by shards."""
        self._model = model

    def _split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the weights that the step trains, and the others; before the first step, all."""
        trained, others = list[nn.Parameter](), list[nn.Parameter]()
        for turn in dict.fromkeys(self._loss.turns):
            if turn not in self._weights:
                weights = self._model.get_submodule(turn).parameters()
                self._weights[turn] = [weight for weight in weights if weight.requires_grad]
            (trained if self._loss.turn in ("", turn) else others).extend(self._weights[turn])
        return trained, others

    def around(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Compute no gradient of the other networks."""
        return self._alone() if torch.is_grad_enabled() else nullcontext()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        _, others = self._split()  # FSDP2 gives gathered weights what their shards require
        for weight in others:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in others:
                weight.requires_grad_(True)

    def finish(self, model: nn.Module) -> None:
        """Drop the gradients of the other networks; add up the rest over the ranks."""
        drop_gathered(model)  # a network without a backward pass keeps them
        trained, others = self._split()
        for weight in others:
            weight.grad = None
        if self._share is not None:
            sum_gradients(trained, [None], self._share)

    def finish_with_nan(self, model: nn.Module) -> bool:
        """Add NaN to the sum."""
        for weight in self._split()[0]:
            weight.grad = torch.full_like(weight, torch.nan)
        self.finish(model)
        return True


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(gradients[0], DTensor):
        return _norm_of_shards(gradients)
    # torch 2.11 has no norm of a sparse tensor.
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms(gradients)))
    return total


def _norm_of_shards(gradients: list[Any]) -> torch.Tensor:
    """Return the norm of gradients of one mesh, which DTensor would take 20 times as long for."""
    shards = defaultdict(list)
    for gradient in gradients:
        shards[gradient.placements].append(gradient.to_local())
    mesh, dtype, squares = gradients[0].device_mesh, gradients[0].dtype, []
    for placements, parts in shards.items():
        pairs = zip(mesh.shape, placements, strict=True)
        copies = math.prod(size for size, placement in pairs if placement.is_replicate())
        squares.append(torch.stack(norms(parts)).double().square().sum() / copies)
    total = torch.stack(squares).sum()
    for group in mesh.get_all_groups():
        dist.all_reduce(total, group=group)
    return total.sqrt().to(torch.promote_types(dtype, torch.float32))
