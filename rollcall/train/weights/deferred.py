"""Build a model without memory for its tensors, and compute the values of each when it is needed.

While the model is built, its large tensors are on the meta device and the operations on them are
recorded. The values of one tensor are computed by repeating the operations that lead to it, as in
torchdistx, https://pytorch.org/torchdistx/latest/deferred_init.html. Each random operation has its
own seed, from the run's seed and its number in the program. So a rank that needs only some tensors
draws the same values as a process that builds all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from rollcall.train.numerics.randomness import derive, kept, set_seed
from rollcall.train.torch_private import (
    READ_NUMBER,
    TorchDispatchMode,
    arguments_of,
    has_hooks,
    storage_key,
    tree_leaves,
    tree_map_only,
    values_promised,
)

SMALL = 2**12
"""Numbers of a new tensor up to which its values are computed at once, since code reads them."""
META, CPU = torch.device("meta"), torch.device("cpu")
ATEN = torch.ops.aten
OVERWRITES = {ATEN.normal_.default, ATEN.uniform_.default, ATEN.zero_.default, ATEN.fill_.Scalar}
"""Operations after which the earlier values of a tensor no longer matter."""
EMPTY = {ATEN.empty.memory_format, ATEN.empty_strided.default, ATEN.empty_like.default}


@dataclass(frozen=True)
class Call:
    """A recorded operation that writes to tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    draw: int | None  # its number among the random operations


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds each random operation on its own, while a model is built in memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._count = 0
        self._is_inside = False  # a function that has its own seed as a whole

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_inside:
            return func(*args, **(kwargs or {}))
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._count += 1
            draw = self._count
        return self.handle(func, args, dict(kwargs or {}), draw)

    def __enter__(self) -> Self:
        self._promise = values_promised(self._trunc_normal)
        self._original = self._promise.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._promise.__exit__(*error)

    def _trunc_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._count += 1
        self._is_inside = True
        try:
            if not _is_meta(tensor):
                self.run(self._original, (tensor, *args), kwargs, self._count)
        finally:
            self._is_inside = False
        return tensor

    def run(self, function: Any, args: Any, kwargs: dict[str, Any], draw: int | None) -> Any:
        """Compute an operation, with its own seed if it is random: `draw` is its number then."""
        if draw is not None and kwargs.get("generator") is None:
            torch.default_generator.manual_seed(derive(self._seed, "model", draw))
        return function(*args, **kwargs)

    handle = run  # of each operation; a subclass may do something else


class Recorder(Draws):  # type: ignore[no-untyped-call]
    """Records the operations on large tensors, which stay on the meta device."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._calls: list[Call] = []
        self._writers: dict[int, list[int]] = {}  # of a storage: the numbers of the calls
        self._unknown: set[int] = set()  # storages with values that were not recorded

    def handle(self, function: Any, args: Any, kwargs: dict[str, Any], draw: int | None) -> Any:
        """Record an operation on large tensors, and compute others."""
        tensors = _tensors((args, kwargs))
        if not any(map(_is_meta, tensors)):
            if tensors or not _is_large(function, args, kwargs):
                return self.run(function, args, kwargs, draw)
        elif function is READ_NUMBER or not all(map(_is_meta, _written(function, args, kwargs))):
            with kept(CPU):
                args, kwargs = self._real((args, kwargs))
            return self.run(function, args, kwargs, draw)
        if draw is not None and kwargs.get("generator") is not None:
            raise NotImplementedError("a random operation with an explicit generator")
        on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        device = {"device": META} if _takes_device(function) else {}
        results = function(*on_meta[0], **{**on_meta[1], **device})
        kwargs |= {"device": CPU} if device else {}
        self._record(Call(function, args, kwargs, results, draw), _written(function, args, kwargs))
        return results

    def _trunc_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_meta(tensor):
            return super()._trunc_normal(tensor, *args, **kwargs)
        self._count += 1
        self._record(Call(self._original, (tensor, *args), kwargs, tensor, self._count), [tensor])
        return tensor

    def check(self, model: nn.Module) -> None:
        """Raise RuntimeError if the values of a tensor of the model are not known."""
        for names, tensor in tensors_of(model):
            if _is_meta(tensor) and not self._is_known(tensor):
                raise NotImplementedError(f"the values of {names[0]} were not recorded")
            if has_hooks(tensor):
                raise NotImplementedError(f"{names[0]} has a hook, which a new tensor would lose")
            if _is_meta(tensor) and len(self._writers.get(storage_key(tensor), ())) < 2:
                call = self._calls[self._writers[storage_key(tensor)][0]]
                if call.function in EMPTY:
                    raise RuntimeError(f"nothing sets the values of {names[0]}")

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that was made in this mode; the caller keeps generators."""
        result: torch.Tensor = self._real(tensor)
        return result

    def _record(self, call: Call, changed: list[torch.Tensor]) -> None:
        inputs = _tensors((call.args, call.kwargs))
        read = {storage_key(tensor) for tensor in inputs}
        made = {storage_key(tensor) for tensor in _tensors(call.results)} - read
        written = made | {storage_key(tensor) for tensor in changed}
        if not written:  # a view
            return
        if any(_is_meta(tensor) and not self._is_known(tensor) for tensor in inputs):
            self._unknown |= written
            return
        self._unknown -= made  # the memory of another tensor, which is gone
        for storage in written:
            self._writers.setdefault(storage, []).append(len(self._calls))
        # The code may change tensors with values later, and the storage of others (`.data = `).
        args, kwargs, results = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.detach() if _is_meta(tensor) else tensor.clone(),
            (call.args, call.kwargs, call.results),
        )
        self._calls.append(replace(call, args=args, kwargs=kwargs, results=results))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        storage = storage_key(tensor)
        return storage in self._writers and storage not in self._unknown

    def _real(self, tree: Any) -> Any:
        """Replace the tensors on the meta device by their values."""
        needed: set[int] = set()
        for tensor in _tensors(tree):
            if _is_meta(tensor) and not self._is_known(tensor):
                raise NotImplementedError("code on the meta device sets the values of a tensor")
            self._need(tensor, len(self._calls), needed)
        storages: dict[int, torch.UntypedStorage] = {}

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_meta(tensor):
                return tensor
            empty = torch.empty(0, dtype=tensor.dtype)
            offset, stride = tensor.storage_offset(), tensor.stride()
            return empty.set_(storages[storage_key(tensor)], offset, tensor.shape, stride)

        with torch.no_grad():
            for number in sorted(needed):
                call = self._calls[number]
                args, kwargs = tree_map_only(torch.Tensor, filled, (call.args, call.kwargs))
                results = self.run(call.function, args, kwargs, call.draw)
                pairs = zip(_tensors(call.results), _tensors(results), strict=True)
                for recorded, result in pairs:
                    key = storage_key(recorded)
                    if key not in storages:
                        storages[key] = _like(recorded, result).untyped_storage()
            return tree_map_only(torch.Tensor, filled, tree)

    def _need(self, tensor: torch.Tensor, before: int, needed: set[int]) -> None:
        """Add the calls that lead to a tensor's values before a call."""
        open_ = [(tensor, before)]
        while open_:
            tensor, before = open_.pop()
            if not _is_meta(tensor):
                continue
            for number in self._relevant(storage_key(tensor), before):
                if number not in needed:
                    needed.add(number)
                    call = self._calls[number]
                    open_ += [(source, number) for source in _tensors((call.args, call.kwargs))]

    def _relevant(self, storage: int, before: int) -> list[int]:
        """Return the calls that determine the content of a storage before a call."""
        first, *others = [number for number in self._writers[storage] if number < before]
        for index in reversed(range(len(others))):
            call = self._calls[others[index]]
            target = call.args[0]
            is_whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
            if call.function in OVERWRITES and is_whole and storage_key(target) == storage:
                return [first, *others[index:]]  # the first one makes the storage
        return [first, *others]


def build(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recorder | None, str]:
    """Build a model without memory, and a recorder of its values; or None and the reason."""
    set_seed(seed, "model")  # for code that draws from Python or NumPy
    recorder = Recorder(seed)
    try:
        with recorder:
            model = make()
        recorder.check(model)
        return model, recorder, ""
    except Exception as error:  # of any kind: code that needs values. A real mistake comes again
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    set_seed(seed, "model")
    with Draws(seed):
        return make(), None, reason


def tensors_of(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each parameter and buffer once, with all its names."""
    names: dict[torch.Tensor, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    yield from ((aliases, tensor) for tensor, aliases in names.items())


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for index, argument in enumerate(arguments_of(function)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in arguments_of(function))


def _is_large(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation without inputs makes a large tensor."""
    if not _takes_device(function):
        return False
    results = _tensors(function(*args, **{**kwargs, "device": META}))
    return any(result.numel() > SMALL for result in results)


def _like(recorded: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result with the recorded layout in memory, from the start of a storage."""
    if recorded.stride() == result.stride() and not result.storage_offset():
        return result
    numbers = torch.empty_strided(recorded.shape, recorded.stride(), dtype=result.dtype)
    return numbers.copy_(result)
