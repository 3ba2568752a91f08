"""Hidden state: numbers and tensors that Python objects hold and no checkpoint does.

A counter of a model is an example. Passes before the first step must not move it, and a resumed
run would begin with another value, so that the user has to know.
"""

from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from rollcall.train import torch_private

NUMBERS = bool, int, float, complex, np.generic
LONGEST = 1000
"""Entries of a list or dictionary beyond which it is left out, such as a vocabulary."""
LIBRARIES = {"torch", "numpy", "builtins", "rollcall"}
"""Packages whose objects hold nothing hidden, or what must change."""
OF_OPTIMIZERS = {"state", "param_groups", "defaults", "found_inf", "grad_scale"}
INTERNAL = {*vars(nn.Module()), *OF_OPTIMIZERS}
"""Attributes of every module, or every optimizer."""
Holder = dict[Any, Any] | list[Any]


class Hidden:
    """The hidden state of some objects at one moment."""

    def __init__(self, roots: Mapping[str, object], also_saved: bool = True) -> None:
        """Copy what the objects hold, unless it is saved; each has a name for messages."""
        self._roots = roots
        self._kept = []
        for _, holder, saved in _holders(roots):
            entries, left = _entries(holder), set[str]() if also_saved else saved
            kept = {k: (value, None if k in left else _copy(value)) for k, value in entries.items()}
            self._kept.append((holder, kept))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in place."""
        for holder, kept in self._kept:
            if isinstance(holder, list):
                # Weights in a list, as a recurrent layer has them, stay where they are.
                values = {index: value for index, (value, _) in kept.items()}
                values |= {n: now for n, now in enumerate(holder) if isinstance(now, nn.Parameter)}
                holder[:] = [values[index] for index in sorted(values)]
            else:
                for key in _entries(holder).keys() - kept.keys():
                    if isinstance(holder[key], (*NUMBERS, str, type(None), torch.Tensor)):
                        del holder[key]
                holder.update((key, value) for key, (value, _) in kept.items())
            for value, copy in kept.values():
                if copy is not None and isinstance(value, torch.Generator):
                    value.set_state(copy)
                elif copy is not None:
                    value.data.copy_(copy)

    def changed(self, also_saved: bool = False) -> dict[str, Any]:
        """Return the values that differ now, by name, without results that have a gradient."""
        before = {id(holder): kept for holder, kept in self._kept}
        return {
            f"{name}.{key}" if isinstance(key, str) else name: value
            for name, holder, saved in _holders(self._roots)
            for key, value in _entries(holder).items()
            if (also_saved or key not in saved)
            and _differs(value, *before.get(id(holder), {}).get(key, (None, None)))
        }


class Audit:
    """Finds what the steps of a training change, apart from what was computed once and kept."""

    def __init__(self, roots: Mapping[str, object], stateful: Collection[str], whole: bool) -> None:
        """Begin before the first step; the roots whose names are `stateful` save what they hold."""
        self._roots, self._saved = roots, tuple(f"{name}." for name in stateful)
        self._is_whole, self._start = whole, Hidden(roots, whole)
        self._before = self._start
        self._first: dict[str, Any] | None = None

    def after_step(self) -> tuple[list[str], dict[str, Any]] | None:
        """Return, at the second call, what steps change unsaved, and all that differs by now."""
        changed = self._before.changed()
        if self._first is None:
            self._first, self._before = changed, Hidden(self._roots, also_saved=False)
            return None
        flags = {name for name, value in self._first.items() if isinstance(value, bool)}
        names = flags | (self._first.keys() & changed.keys())
        unsaved = sorted(name for name in names if not name.startswith(self._saved))
        return unsaved, self._start.changed(self._is_whole)


@contextmanager
def left_alone(roots: Mapping[str, object]) -> Iterator[None]:
    """Put the hidden state of these objects back at the end."""
    state = Hidden(roots)
    try:
        yield
    finally:
        state.restore()


def held(root: object, apart: Container[int]) -> Iterator[Any]:
    """Yield all that an object holds, but not in dictionaries and lists whose ids are `apart`."""
    for _, holder, _ in _holders({"": root}):
        if id(holder) not in apart:
            yield from _entries(holder).values()


def _holders(roots: Mapping[str, object]) -> Iterator[tuple[str, Holder, set[str]]]:
    """Yield dictionaries and lists below the roots, with names, and the keys that are saved."""
    seen: set[int] = set()
    for root_name, root in roots.items():
        packages, todo = _packages(root), [(root_name, root)]
        while todo:
            name, value = todo.pop()
            is_known = isinstance(value, nn.Module | torch.optim.Optimizer)
            is_users = _package(value) in packages and hasattr(value, "__dict__")
            holder: Any = value
            if is_known or (is_users and not isinstance(value, type | torch.Tensor)):
                holder = vars(value)
            if id(holder) in seen or not isinstance(holder, dict | list) or len(holder) > LONGEST:
                continue
            seen.add(id(holder))
            yield name, holder, set()
            todo += [(f"{name}.{key}", entry) for key, entry in _entries(holder).items()]
            if isinstance(value, nn.Module):
                buffers: Any = torch_private.buffers_of(value)
                if not isinstance(buffers, dict):  # of a TorchScript module
                    buffers = {}
                seen.add(id(buffers))
                yield name, buffers, {*buffers} - torch_private.temporary_buffers(value)
                todo += [(f"{name}.{key}", child) for key, child in value.named_children()]


def _packages(root: object) -> set[str]:
    """Return the user's packages of an object, or of what a container of torch holds."""
    package = _package(root)
    parts = root.modules() if isinstance(root, nn.Module) and not package else ()
    return {package, *map(_package, parts)} - {""}


def _package(value: object) -> str:
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return "" if package in LIBRARIES else package


def _entries(holder: Holder) -> dict[Any, Any]:
    """Return the entries of a dictionary or a list, without weights and attributes of torch."""
    entries = dict(enumerate(holder)) if isinstance(holder, list) else holder
    is_of_torch = "training" in entries or "param_groups" in entries  # a module, an optimizer
    internal = INTERNAL if is_of_torch else set[str]()
    return {
        key: value
        for key, value in entries.items()
        if key not in internal and not isinstance(value, nn.Parameter)
    }


def _copy(value: Any) -> torch.Tensor | None:
    """Return a copy of the numbers in a tensor, or of the state of a generator."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if not isinstance(value, torch.Tensor) or value.grad_fn is not None:
        return None
    return None if value.is_meta or value.is_inference() else value.detach().clone()


def _differs(value: Any, before: Any, copy: torch.Tensor | None) -> bool:
    """Return True if a number, a tensor or a generator is not equal to what was kept."""
    if isinstance(value, NUMBERS):
        return not isinstance(before, NUMBERS) or bool(before != value and value == value)
    now = _copy(value)
    return now is not None and (copy is None or differ(now, copy))


def differ(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if tensors have other forms or numbers."""
    if tensor is other or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return tensor is not other
    if tensor.layout is not torch.strided:
        tensor, other = tensor.to_dense(), other.to_dense()
    return not torch.equal(tensor, other.to(tensor.device))
