"""Each rank computes a piece of every sequence; in attention it has whole ones, of some heads.

Ulysses, https://arxiv.org/abs/2309.14509. Around attention an all-to-all exchanges pieces of the
sequences for heads, and back. torch's own context parallelism does not run on CPUs (2.15).
Attention is met by its name, torch.nn.functional.scaled_dot_product_attention, so the models' files
stay plain.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from train.config import Config
from train.data.source import Batch
from train.parallel.part import Part, nearest_multiples
from train.schema import ConfigError

PLANS: dict[str, Mapping[str, int]] = {"gpt": {"block*.attention.rotation": 1}}
"""Buffers of a model that hold something for each position, and in which dimension."""
LENGTH, HEADS = 2, 1
"""Dimensions of what goes into attention: (rows, heads, length, width)."""


class Context(Part):
    """Sequences cut into as many pieces as the dimension has ranks."""

    def __init__(self, mesh: DeviceMesh, config: Config, tensor: int) -> None:
        """Take the degree.

        Args:
            tensor: ranks over which the heads of a piece are divided.
        """
        self._group = mesh.get_group()
        self._rank, self._degree = mesh.get_local_rank(), mesh.size()
        self._name = config.model.name
        self._tensor = tensor
        self._plan: Mapping[str, int] = {}
        self._travels = 0

    def check(self, model: nn.Module, example: Batch) -> None:
        """Sequences and heads must divide, and where the model holds positions must be known."""
        own: Any = getattr(model, "context_plan", None)
        if own is not None:
            self._plan = own
        elif self._name in PLANS:
            self._plan = PLANS[self._name]
        else:
            raise ConfigError(
                f"context parallelism has no plan for model.name={self._name}: give the model one "
                f"as its attribute context_plan, or choose one of {', '.join(PLANS)}"
            )
        if example.targets.shape != example.inputs.shape[:2]:
            raise ConfigError(
                "context parallelism needs sequences with a target for each position, but the "
                f"samples of this data have inputs of shape {tuple(example.inputs.shape[1:])} and "
                f"targets of shape {tuple(example.targets.shape[1:])}: choose data.name=text"
            )
        length = example.inputs.shape[1]
        if length % self._degree:
            raise ConfigError(
                f"sequences of {length} do not divide by context={self._degree}; choose "
                f"data.context={nearest_multiples(length, self._degree)}"
            )
        saved = model.state_dict()
        for pattern in self._plan:
            if fnmatch.filter(saved, pattern):
                raise ConfigError(
                    f"context_plan names {pattern}, which checkpoints hold whole: make it a buffer "
                    "with persistent=False"
                )
        self._check_heads(model, example)

    def _check_heads(self, model: nn.Module, example: Batch) -> None:
        def look(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
            heads, shared, parts = query.shape[HEADS], key.shape[HEADS], self._tensor
            if heads // parts % self._degree:
                by = f"context={self._degree}" + f" times tensor={parts}" * (parts > 1)
                raise ConfigError(
                    f"attention with {heads} heads does not divide by {by}; choose "
                    f"model.heads={nearest_multiples(heads, self._degree * parts)}"
                )
            repeated = math.lcm(shared // parts, self._degree)
            self._travels += (2 * heads // parts + 2 * repeated) * query.shape[-1]
            return scaled_dot_product_attention(query, key, *rest, **options)

        with torch.no_grad(), _attention(look):
            model(example.inputs[:1])
        if not self._travels:
            raise ConfigError(
                f"context parallelism found no attention in model.name={self._name}: let it call "
                "torch.nn.functional.scaled_dot_product_attention by this name, with its module"
            )

    def apply(self, model: nn.Module) -> None:
        """Leave of what the model holds for each position that of this rank's piece."""
        for module, leaf, dimension in list(self._positions(model)):
            piece = self._piece(getattr(module, leaf), dimension).clone()
            # No longer a buffer: DDP would give every rank those of the first.
            delattr(module, leaf)
            setattr(module, leaf, piece)

    def _positions(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
        for name, module in model.named_modules():
            for leaf, _ in module.named_buffers(recurse=False):
                for pattern, dimension in self._plan.items():
                    if fnmatch.fnmatch(f"{name}.{leaf}", pattern):
                        yield module, leaf, dimension

    def describe(self, model: nn.Module) -> str:  # noqa: ARG002
        """The exchanges."""
        return (
            f"Each rank computes 1/{self._degree} of every sequence; per micro-batch all-to-alls "
            f"of {self._travels} numbers a token in the forward and as many in the backward."
        )

    def share(self, batch: Batch) -> Batch:
        """This rank's piece of every sequence; the mean over a sample is that of its pieces."""
        return Batch(
            self._piece(batch.inputs, 1),
            self._piece(batch.targets, 1),
            batch.weights / self._degree,
        )

    def around(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Attention goes through the exchange; also where a backward computes a forward again."""
        return _attention(self._attend)

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """The pieces of all ranks, one after the other."""
        pieces = [torch.empty_like(outputs) for _ in range(self._degree)]
        dist.all_gather(pieces, outputs.contiguous(), group=self._group)
        return torch.cat(pieces, 1)

    def _piece(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        return whole.chunk(self._degree, dimension)[self._rank]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of whole sequences for this rank's share of the heads."""
        if rest or options.get("attn_mask") is not None:
            raise ConfigError(
                "context parallelism cannot cut an attention mask: use is_causal=True"
            )
        # Heads of keys and values that do not divide are repeated until they do: heads of queries
        # divide, so each rank has as many for one as before.
        times = math.lcm(key.shape[HEADS], self._degree) // key.shape[HEADS]
        key, value = (x.repeat_interleave(times, HEADS) for x in (key, value))
        query, key, value = (self._exchange(x, HEADS, LENGTH) for x in (query, key, value))
        mixed = scaled_dot_product_attention(query, key, value, **options)
        return self._exchange(mixed, LENGTH, HEADS)

    def _exchange(self, x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        found: torch.Tensor = _Exchange.apply(x, cut, joined, self._group)
        return found


class _Exchange(torch.autograd.Function):
    """Cut a tensor, send each rank its part, and join what the ranks sent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, joined: int, group: Any) -> torch.Tensor:
        ctx.how = cut, joined, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cut, joined, group = ctx.how
        return _Exchange.apply(gradient, joined, cut, group), None, None, None


@contextmanager
def _attention(function: Callable[..., Any]) -> Iterator[None]:
    """Another function in place of torch's attention, for whoever finds it in its module.

    Not a TorchFunctionMode: that is off within a backward, which may compute a forward again.
    """
    functional.scaled_dot_product_attention = function
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = scaled_dot_product_attention
