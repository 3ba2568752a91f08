"""What does a forward pass keep for the backward pass, and what is computed again?

Chen et al., Training deep nets with sublinear memory cost, https://arxiv.org/abs/1604.06174;
selective: Korthikanti et al., https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from train.parallel.shard import units
from train.schema import ConfigError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# Multiplications take most of the time of a forward, and messages keep others waiting.
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
    """Let the blocks of a model keep little for the backward pass, and compute the rest again.

    Args:
        model: its blocks are the members of its outermost containers, as for `zero3`.
        mode: none keeps everything; blocks keeps the inputs of blocks; selective also keeps the
            results of matrix multiplications, convolutions and attention.

    Raises:
        ConfigError: the model has no containers.
    """
    if mode == "none":
        return
    blocks = list(units(model))
    if not blocks:
        raise ConfigError(
            f"model.activation_checkpointing={mode} works block by block, and this "
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList of blocks"
        )
    for block in blocks:
        kind = type(block)
        # A subclass, not a wrapper: names and attributes stay, and whoever copies it copies this.
        block.__class__ = type(
            f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {"selective": mode != "blocks"}
        )


class _Checkpointed(nn.Module):
    selective: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(
            super().forward,
            *args,
            use_reentrant=False,
            context_fn=partial(_contexts, self, self.selective),
            **kwargs,
        )


def _contexts(block: nn.Module, selective: bool) -> Contexts:
    """What surrounds the first computation of a block, and the second."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    if not selective:
        return nullcontext(), _counted_once(norms)
    first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return first, _both(_counted_once(norms), second)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    namespace = getattr(operation, "namespace", "")
    keep = operation in KEPT or namespace in KEPT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _counted_once(norms: list[_BatchNorm]) -> Iterator[None]:
    """BatchNorm's running statistics have already taken in what is computed again."""
    before = [(norm.momentum, _count(norm)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:  # it is left by an exception when all that was wanted is there
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if count is not None:
                norm.num_batches_tracked.copy_(count)  # type: ignore[union-attr]


def _count(norm: _BatchNorm) -> torch.Tensor | None:
    return None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
