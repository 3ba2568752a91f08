"""Activation checkpointing: keep less for the backward pass, and recompute the rest.

Chen et al., Training deep nets with sublinear memory cost, https://arxiv.org/abs/1604.06174;
selective: Korthikanti et al., https://arxiv.org/abs/2205.05198.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from rollcall.config.schema import ConfigError
from rollcall.train.parallel.shard import units

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# Multiplications take most of the time of a forward pass; messages keep other ranks waiting.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
KEPT_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def recompute(model: nn.Module, mode: str) -> None:
    """Let the blocks of a model keep less for the backward pass, and recompute the rest.

    Blocks are the members of the outermost containers, as for `zero3`. The mode `blocks` keeps
    their inputs, `selective` also the results of matrix multiplications, convolutions and
    attention, `none` everything.

    Raises:
        ConfigError: the model has no blocks.
    """
    if mode == "none":
        return
    blocks = list(units(model))
    if not blocks:
        raise ConfigError(
            f"model.activation_checkpointing={mode} needs a model with blocks in an nn.Sequential "
            f"or nn.ModuleList, but this {type(model).__name__} has none"
        )
    for block in blocks:
        kind = type(block)
        # A subclass, not a wrapper: names and attributes stay, and a copy of the block has it too.
        block.__class__ = type(
            f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {"selective": mode != "blocks"}
        )


class _Checkpointed(nn.Module):
    selective: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": partial(_contexts, self, self.selective)}
        if torch.compiler.is_compiling():  # torch's own contexts alone; no buffer changes twice
            options = {"context_fn": SELECTIVE} if self.selective else {}
        return checkpoint.checkpoint(
            super().forward, *args, use_reentrant=False, **options, **kwargs
        )


def _contexts(block: nn.Module, selective: bool) -> Contexts:
    """Return the contexts of the first and of the repeated forward pass of a block."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    if not selective:
        return nullcontext(), _counted_once(norms, nullcontext())
    first, second = SELECTIVE()
    return first, _counted_once(norms, second)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    namespace = getattr(operation, "namespace", "")
    keep = operation in KEPT or namespace in KEPT_NAMESPACES
    return (
        checkpoint.CheckpointPolicy.MUST_SAVE
        if keep
        else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    )


SELECTIVE = partial(checkpoint.create_selective_checkpoint_contexts, _policy)


@contextmanager
def _counted_once(norms: list[_BatchNorm], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Leave BatchNorm's running statistics as the first forward pass has updated them."""
    before = [(norm.momentum, _count(norm)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        with inner:
            yield
    finally:  # torch stops the repeated pass by an exception once it has what it needs
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if count is not None:
                norm.num_batches_tracked.copy_(count)  # type: ignore[union-attr]


def _count(norm: _BatchNorm) -> torch.Tensor | None:
    return None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
