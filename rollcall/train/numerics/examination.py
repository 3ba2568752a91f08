"""A pass of the check before the first step: what it draws and writes does not outlast it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollcall.train import torch_private
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.numerics.hidden import differ, left_alone
from rollcall.train.numerics.randomness import kept
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.meeting import Meeting
from rollcall.train.torch_private import TorchDispatchMode, arguments_of, storage_key, tree_leaves

Arguments = dict[str, Any]
EXPECTED: dict[str, Callable[[Arguments], Any]] = {
    "bernoulli": lambda given: given.get("p", given.get("self")),
    "normal": lambda given: given.get("mean", 0) + given.get("std", 1) / 2,
    "rand": lambda _: 0.5,
    "randn": lambda _: 0.5,
    "randint": lambda given: (given.get("low", 0) + given["high"]) // 2,
    "uniform": lambda given: (given.get("from", 0) + given.get("to", 1)) / 2,
}
"""Functions that return a number in place of random ones, the same in a tensor and in its pieces.
Dropout keeps everything. Normal numbers differ from 0, which would hide what is made of them."""


@functools.cache
def _facts(func: Any) -> tuple[list[str], list[str], bool, bool]:
    """Return an operation's arguments, those it writes to, whether it is random or computes new."""
    arguments = arguments_of(func)
    written = [arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write]
    is_random = bool(arguments) and torch.Tag.nondeterministic_seeded in func.tags
    # What it writes to has its format already, such as a gradient that a loss divides.
    is_new = not (written or getattr(func, "is_view", False))
    return [arg.name for arg in arguments], written, is_random, is_new


class Examination(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a pass writes to; unless it `draws`, EXPECTED replaces random numbers."""

    supports_higher_order_operators = True

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, draws: bool = False, meeting: Meeting | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._meeting = draws, meeting
        self._model = model
        # Copies, because the kernels of norms do not declare that they write to statistics.
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        locals_of = ((name, local_of(tensor)) for name, tensor in tensors)
        # Beside each tensor another of its memory, which `weight.data = …` would replace.
        self._watched = {
            storage_key(tensor): (name, tensor, tensor.detach())
            for name, tensor in locals_of
            if tensor.layout is torch.strided
        }
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_random = False  # whether anything was drawn
        self.has_drawn = False  # numbers that are not in EXPECTED
        self.formats = set[torch.dtype]()  # of what operations of the forward pass compute

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # of the class
        """Let torch compile in a pass that draws: some code must be compiled whole."""
        return self._draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it computes with its parts, and sends, comes here again
        _, written, is_random, is_new = _facts(func)
        if self._meeting:
            self._meeting.before(func)
        call = functools.partial(self._dispatch, func) if written or is_random else func
        result = call(*args, **(kwargs or {}))
        if is_new and not torch_private.is_backward():
            tensors = result if isinstance(result, tuple | list) else (result,)
            self.formats |= {part.dtype for part in tensors if isinstance(part, torch.Tensor)}
        return result

    def _dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        names, written, is_random, _ = _facts(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in written:
            self._keep(given.get(argument))
        if self._draws or not is_random:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__.rstrip("_").removesuffix("_like")
        for dropped in {"dropout_p", *(("p",) if name == "native_dropout" else ())} & {*names}:
            if dropped not in given:  # attention with a mask leaves out the default, 0
                return func(*args, **kwargs)
            at = names.index(dropped)
            self.is_random |= bool(given[dropped])
            return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
        self.is_random = True
        result = func(*args, **kwargs)
        if name in EXPECTED:
            value = EXPECTED[name](given)
            return result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        self.has_drawn = True
        return result

    @torch.no_grad()
    def _keep(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                key = storage_key(local_of(tensor))
                name, whole, memory = self._watched.get(key, ("", tensor, tensor))
                if name and name not in self._before:
                    self._before[name] = whole, memory.clone()

    def changed(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights and buffers that have changed, by their names."""
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        written = self.written()
        return {
            name: tensor.detach().clone()
            for name, tensor in tensors.items()
            if name in written or differ(tensor, self._buffers.get(name, tensor))
        }

    def written(self) -> set[str]:
        """Return the names of what was written to, or has got other memory, as far as declared."""
        return {*self._before, *(name for name, _, _ in self._replaced())}

    def _replaced(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [entry for key, entry in self._watched.items() if storage_key(entry[1]) != key]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors their former memory and values."""
        for _, tensor, memory in self._replaced():
            tensor.data = memory
        for tensor, before in self._before.values():
            tensor.copy_(before)


@contextmanager
def examined(
    model: nn.Module,
    loss: object,
    device: torch.device,
    draws: bool = False,
    meeting: Meeting | None = None,
) -> Iterator[Examination]:
    """Observe a pass; at the end, restore all that it has changed, also random numbers."""
    drop_gathered(model)  # copies that the pass would free, and that nothing could be put back into
    cudnn = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False  # its RNNs have no backward pass in evaluation mode
    examination = Examination(model, draws, meeting)
    try:
        with left_alone({"model": model, "loss": loss}), kept(device), examination:
            yield examination
    finally:
        examination.put_back()
        torch.backends.cudnn.enabled = cudnn
