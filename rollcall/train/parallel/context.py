"""Context parallelism: each rank computes a piece of every sequence, but attention of whole ones.

Ulysses, https://arxiv.org/abs/2309.14509. Before attention an all-to-all exchanges pieces of the
sequences for heads, and back afterwards. torch's own context parallelism does not run on CPUs
(2.15). Models need no change: torch.nn.functional.scaled_dot_product_attention is replaced.
"""

import fnmatch
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from rollcall.config import Config, ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.numerics.randomness import Fork
from rollcall.train.parallel.part import Part, named_buffers, nearest_multiples, one_input
from rollcall.train.torch_private import all_to_all, replaced

ATTENTION = functional, "scaled_dot_product_attention"
"""It is replaced: a TorchFunctionMode would be off where a backward pass repeats a forward."""
LENGTH, HEADS = 2, 1
"""Dimensions of the inputs of attention: (rows, heads, length, width)."""


class Context(Part):
    """Sequences cut into one piece for each rank of the dimension."""

    suspicion = (
        "position ids that the model makes itself, which start at 0 in every piece of a sequence: "
        "let its forward method accept position_ids, or name a buffer with one entry per position "
        "in context_plan; a loss that is no mean over a row, and returns no weights"
    )

    def __init__(self, mesh: DeviceMesh, config: Config, tensor: int) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._rank, self._degree = mesh.get_local_rank(), mesh.size()
        self._name = config.model.name
        self._tensor = tensor  # the degree of tensor parallelism, which also divides the heads

    def check(self, model: nn.Module, example: Batch) -> None:
        """Take the model's plan; sequences and heads must divide."""
        self._plan: Any = getattr(model, "context_plan", None)
        if self._plan is None:
            raise ConfigError(
                f"model.name={self._name} has no plan for context parallelism: give the model an "
                "attribute context_plan, or choose a model that has one, such as gpt"
            )
        one_input(example, "context parallelism")
        if getattr(example.targets, "shape", None) != example.inputs.shape[:2]:
            raise ConfigError(
                "context parallelism expects sequences with a target for each position, got inputs "
                f"of shape {tuple(example.inputs.shape[1:])} and targets of shape "
                f"{tuple(getattr(example.targets, 'shape', [])[1:])}; choose data.name=text"
            )
        length = example.inputs.shape[1]
        if length % self._degree:
            raise ConfigError(
                f"data.seq_len={length} does not divide by context={self._degree}; choose "
                f"{nearest_multiples(length, self._degree)}"
            )
        for pattern in self._plan:
            if fnmatch.filter(model.state_dict(), pattern):
                raise ConfigError(
                    f"context_plan: {pattern} is saved in checkpoints, so it cannot be cut: "
                    "register the buffer with persistent=False"
                )
        self._check_heads(model, example)

    def _check_heads(self, model: nn.Module, example: Batch) -> None:
        calls: list[int] = []

        def look(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
            heads, parts = query.shape[HEADS], self._tensor
            if heads // parts % self._degree:
                by = f"context={self._degree}" + f" times tensor={parts}" * (parts > 1)
                raise ConfigError(
                    f"attention with {heads} heads does not divide by {by}; choose "
                    f"model.num_heads={nearest_multiples(heads, self._degree * parts)}"
                )
            calls.append(heads)
            return scaled_dot_product_attention(query, key, *rest, **options)

        home = next(model.parameters()).device
        try:
            with torch.no_grad(), replaced(*ATTENTION, look):
                model(example.inputs[:1].to(home))
        except (TypeError, RuntimeError):
            if home.type == "meta":  # the model reads values, which it does not have yet
                return
            raise
        if not calls:
            raise ConfigError(
                f"model.name={self._name} does not call "
                "torch.nn.functional.scaled_dot_product_attention, which context parallelism "
                "replaces: call it by that name, through its module"
            )

    def apply(self, model: nn.Module) -> None:
        """Prepare random numbers and, for a model that takes them, the numbers of positions."""
        self._fork = Fork(self._mesh.device_type, "context", self._rank)
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        if takes_positions and not self._plan:
            model.register_forward_pre_hook(self._number_positions, with_kwargs=True)

    def keep_piece(self, model: nn.Module) -> None:
        """Keep this rank's piece of the buffers with one entry per position."""
        for name, module, leaf in named_buffers(model):
            names = name, f".{name}"  # "*.rope" is also a buffer of the model itself
            chosen = [p for p in self._plan if any(fnmatch.fnmatch(n, p) for n in names)]
            for dimension in [self._plan[p] for p in chosen]:
                piece = self._piece(getattr(module, leaf), dimension).clone()
                # No longer a buffer: DDP would broadcast the first rank's.
                delattr(module, leaf)
                setattr(module, leaf, piece)

    def _number_positions(
        self, _: nn.Module, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Pass the positions of this rank's piece of the sequences: (1, length)."""
        length = inputs[0].shape[1]
        first = self._rank * length
        places = torch.arange(first, first + length, device=inputs[0].device).unsqueeze(0)
        return inputs, {"position_ids": places, **options}

    def share(self, batch: Batch) -> Batch:
        """Return this rank's piece of every sequence, with its share of the weight."""
        inputs, targets = self._piece(batch.inputs, 1), self._piece(batch.targets, 1)
        return Batch(inputs, targets, batch.weights / self._degree)

    @contextmanager
    def around(self, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Replace attention, also in a forward pass that a backward pass repeats."""
        with replaced(*ATTENTION, self._attend), self._fork.inside():
            yield

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """Concatenate the pieces of all ranks."""
        pieces = [torch.empty_like(outputs) for _ in range(self._degree)]
        dist.all_gather(pieces, outputs.contiguous(), group=self._group)
        return torch.cat(pieces, 1)

    def _piece(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        return whole.chunk(self._degree, dimension)[self._rank]

    def _attend(self, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> torch.Tensor:
        """Compute attention of whole sequences, for this rank's share of the heads."""
        if rest or options.get("attn_mask") is not None:
            raise ConfigError(
                "context parallelism does not support an attention mask: use is_causal=True"
            )
        # Heads of keys and values that do not divide are repeated until they do. Query heads do
        # divide, so the number of query heads per key head is the same on each rank.
        times = math.lcm(key.shape[HEADS], self._degree) // key.shape[HEADS]
        key, value = (x.repeat_interleave(times, HEADS) for x in (key, value))
        query, key, value = (_exchange(x, HEADS, LENGTH, self._group) for x in (query, key, value))
        mixed = scaled_dot_product_attention(query, key, value, **options)
        return _exchange(mixed, LENGTH, HEADS, self._group)


def _exchange(x: torch.Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut a tensor, send each rank its part, and concatenate the parts received."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
    return torch.cat(all_to_all(sent, None, None, group).unbind(), joined)
