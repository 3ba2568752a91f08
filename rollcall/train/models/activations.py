"""Activation checkpointing: keep less for the backward pass, and recompute the rest.

Chen et al., Training deep nets with sublinear memory cost, https://arxiv.org/abs/1604.06174;
selective: Korthikanti et al., https://arxiv.org/abs/2205.05198.
"""

from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import checkpoint

from rollcall.config.schema import ConfigError
from rollcall.messages.text import listed
from rollcall.train import torch_private
from rollcall.train.numerics.examination import Examination
from rollcall.train.numerics.hidden import Hidden, held, left_alone
from rollcall.train.parallel.shard import units
from rollcall.train.torch_private import COSTLY, MESSAGES, PROFILER, BatchNorm, buffers_of, version

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# Multiplications take most of the time of a forward pass; messages keep other ranks waiting.
SAVED_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    *COSTLY,
}
# FSDP2 profiles its gathers, of which a block with units inside has fewer when it is recomputed.
checkpoint.SAC_IGNORED_OPS.update(PROFILER)


def recompute(model: nn.Module, mode: str) -> None:
    """Let blocks keep less, as `model.activation_checkpointing` says; ConfigError without any."""
    if mode == "none":
        return
    # A last layer keeps no more than its input, and may compute the loss, too (parallel/head.py).
    last = dict(model.named_modules()).get(getattr(model, "output_layer", None) or " ")
    if not (blocks := [block for block in dict.fromkeys(units(model)) if block is not last]):
        raise ConfigError(
            f"model.activation_checkpointing={mode} needs a model with blocks in an nn.Sequential "
            f"or nn.ModuleList, but this {type(model).__name__} has none"
        )
    # Subclasses, not wrappers: they keep names and attributes, and copies of a block keep them. One
    # of each kind, because what is compiled holds for blocks of the same class alone.
    kinds = {
        kind: type(
            f"Checkpointed{kind.__name__}",
            (_Checkpointed, kind),
            {"mode": mode, "__module__": kind.__module__},  # whose objects are the user's
        )
        for kind in dict.fromkeys(map(type, blocks))
    }
    for block in blocks:
        block.__class__ = kinds[type(block)]


MOVES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""True for blocks whose attributes or buffers, other than BatchNorm's, change before a
recomputation."""


class _Checkpointed(nn.Module):
    mode: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": SELECTIVE} if self.mode == "selective" else {}
        if torch.compiler.is_compiling():  # compiled code changes no buffer twice
            options |= kwargs
            return checkpoint.checkpoint(super().forward, *args, use_reentrant=False, **options)
        marks = None if self in MOVES else _marks(self)
        options = {"context_fn": partial(_contexts, self, marks)}
        # torch refuses a tensor that changes before it is used again, if it gets it by itself.
        leaves, form = torch_private.tree_flatten((args, kwargs))
        call = partial(_call, super().forward, form)
        again = partial(checkpoint.checkpoint, call, *leaves, use_reentrant=False, **options)
        if marks is None:
            return again()
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        before = [*map(_mark, given)]
        with Examination(self, draws=True) as seen:
            outputs = again()
        written = sorted(seen.written() & {*dict(self.named_parameters())})
        if [*map(_mark, given)] != before or written:
            what = f"its weights {listed(written)}" if written else "its inputs in place"
            raise ConfigError(
                f"model.activation_checkpointing={self.mode} computes each block again, but the "
                f"forward() of {type(self).__mro__[2].__name__} changes {what}, so that it would "
                "compute something else: make it change none, or remove the key"
            )
        return outputs


def _call(forward: Callable[..., Any], form: Any, *leaves: Any) -> Any:
    args, kwargs = torch_private.tree_unflatten(leaves, form)
    return forward(*args, **kwargs)


Marks = list[tuple[Any, int]]


def _marks(block: nn.Module) -> Marks:
    """Return the entries of a block, its lists and objects, but BatchNorm's, with marks."""
    norms = [part for part in block.modules() if isinstance(part, BatchNorm)]
    apart = {id(kept) for norm in norms for kept in (vars(norm), buffers_of(norm))}
    return [(value, _mark(value)) for value in held(block, apart)]


def _mark(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else version(value)
    return len(value) if isinstance(value, Sized) else 0


def _contexts(block: _Checkpointed, marks: Marks | None) -> Contexts:
    """Return contexts for a block's first and repeated pass; `marks` show if it moves."""
    first, inner = SELECTIVE() if block.mode == "selective" else (nullcontext(), nullcontext())
    before = Hidden({"": block}) if MOVES.get(block, True) else None

    def make() -> AbstractContextManager[Any]:
        second = _counted_once(block, inner)
        return _from_the_same(block, before, marks, second) if before else second

    return first, _EachTime(make)


class _EachTime(AbstractContextManager[Any]):
    """A context made anew for each pass: a loss with gradients of gradients repeats some twice."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> Any:
        self._inner = self._make()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)


@contextmanager
def _from_the_same(
    block: nn.Module, before: Hidden, marks: Marks | None, inner: AbstractContextManager[Any]
) -> Iterator[None]:
    """Let a repeated pass begin as the first one did, and restore what that one left."""
    if marks is not None and block.training:
        now = _marks(block)
        pairs = zip(marks, now, strict=False)
        same = (old is new and mark == other for (old, mark), (new, other) in pairs)
        MOVES[block] = len(now) != len(marks) or not all(same)
    with left_alone({"": block}):  # torch ends the repeated pass by an exception
        before.restore()
        with inner:
            yield


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    if operation in SAVED_OPERATIONS or getattr(operation, "namespace", "") in MESSAGES:
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(checkpoint.create_selective_checkpoint_contexts, _policy)


@contextmanager
def _counted_once(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Keep the statistics of BatchNorm that the first pass has left; `Hidden` would be slower."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        with inner:
            yield
    finally:  # torch ends the repeated pass by an exception as soon as possible
        for buffer, copy in kept:
            buffer.data.copy_(copy)
