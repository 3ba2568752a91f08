"""Loading a state: DCP lists the pieces that a rank needs, and each is checked."""

import ctypes
import math
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from rollcall.config import ConfigError
from rollcall.system.files import open_regular
from rollcall.train.checkpoint.contents import Damaged, Key, Manifest, Piece, StoredTensor, dotted
from rollcall.train.checkpoint.write import BLOCK
from rollcall.train.torch_private import unflatten_state_dict

READERS = 4
"""Threads that read pieces and check them; each has one piece in memory."""


class DataFiles(ExitStack):
    """The data files of a checkpoint; each is opened when it is first needed."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._open: dict[str, int] = {}
        self._lock = Lock()

    def pieces(
        self, wanted: Iterable[tuple[StoredTensor, Piece, torch.Tensor | None]]
    ) -> Iterator[torch.Tensor]:
        """Yield the numbers of pieces, read ahead by threads; fill fitting CPU tensors in place."""
        ahead: deque[Future[torch.Tensor]] = deque()
        with ThreadPoolExecutor(READERS) as readers:
            for tensor, piece, target in wanted:
                ahead.append(readers.submit(self.piece, tensor, piece, target))
                if len(ahead) > READERS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def piece(
        self, tensor: StoredTensor, piece: Piece, target: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the numbers of a piece, on the CPU; raise Damaged if they were changed."""
        if target is None:
            target = torch.empty(piece.shape, dtype=getattr(torch, tensor.dtype))
        try:
            crc32 = self._fill(target, piece)
        except OSError as error:
            raise Damaged(f"{piece.file} cannot be read: {error.strerror}") from None
        if crc32 != piece.crc32:
            raise Damaged(f"{piece.file} is not what was written: {tensor.name} differs")
        return target

    def view(self, tensor: StoredTensor, piece: Piece) -> memoryview:
        """Return the bytes of a piece; raise Damaged if they were changed."""
        return view(self.piece(tensor, piece))

    def _fill(self, data: torch.Tensor, piece: Piece) -> int:
        with self._lock:
            if piece.file not in self._open:
                file = open_regular(self._directory / piece.file, os.O_NOFOLLOW)
                self._open[piece.file] = self.enter_context(file).fileno()
        descriptor = self._open[piece.file]
        rest, start, crc32 = view(data), piece.start, 0
        while rest:
            count = os.preadv(descriptor, [rest[:BLOCK]], start)
            if not count:
                raise Damaged(f"{piece.file} ends too early")
            crc32 = zlib.crc32(rest[:count], crc32)
            rest, start = rest[count:], start + count
        return crc32


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; the view keeps the tensor alive."""
    # By its address: a view is made before the copy from a GPU has arrived, and reads nothing.
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def load(
    directory: Path, stored: Manifest, state: dict[str, Any], whole: bool = True, fill: bool = True
) -> set[str]:
    """Fill the tensors of `state` in place and replace its plain values; return the dotted names.

    Without `fill`, only check the bytes that it needs. A checkpoint that is not `whole` holds one
    node's part. Raise Damaged if the data is not what was written or something is missing, and
    ConfigError if the checkpoint belongs to another model.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state)
    flat = dict(planner.state_dict)
    names = set(flat)
    for name in [name for name in flat if whole and _had_no_gradient(name, stored)]:
        fresh = flat.pop(name)
        if fill and isinstance(fresh, torch.Tensor):
            fresh.detach().zero_()  # a failed load of another checkpoint may have filled it
    # A run may have begun with a loss that has no tensors.
    if "config" in stored.facts and all(key.key[0] != "loss" for key in stored.tensors.values()):
        flat = {name: value for name, value in flat.items() if not name.startswith("loss.")}
    _compare(directory, stored, flat, whole)
    forms = metadata.Metadata({name: _metadata(stored, name) for name in flat})
    plan = create_default_local_load_plan(flat, forms)
    if not whole:
        _check_cover(plan.items, flat)

    wanted: list[tuple[ReadItem, StoredTensor, Piece]] = []
    for item in plan.items:
        name, number = item.storage_index.fqn, item.storage_index.index
        if item.type != LoadItemType.BYTE_IO:
            assert number is not None, "every tensor's item has one"
            wanted.append((item, stored.tensors[name], stored.tensors[name].pieces[number]))
        elif fill:
            put(state, *stored.values[name])
    wanted.sort(key=lambda entry: (entry[2].file, entry[2].start))
    targets = [planner.resolve_tensor(item).detach() if fill else None for item, *_ in wanted]
    requests = (
        (tensor, piece, target if _is_filled_by(target, tensor, piece, item) else None)
        for (item, tensor, piece), target in zip(wanted, targets, strict=True)
    )
    with DataFiles(directory) as files:
        results = zip(wanted, targets, files.pieces(requests), strict=True)
        for (item, *_), target, numbers in results:
            if target is not None and target is not numbers:
                target.copy_(numbers[slices(item.storage_offsets, item.lengths)])
    return names


def _is_filled_by(
    target: torch.Tensor | None, tensor: StoredTensor, piece: Piece, item: ReadItem
) -> bool:
    """Return True if the bytes of the whole piece can be read into the target."""
    if target is None or target.dtype != getattr(torch, tensor.dtype):
        return False
    is_plain = target.is_cpu and target.is_contiguous()
    return is_plain and tuple(target.shape) == tuple(item.lengths) == tuple(piece.shape)


def whole(
    directory: Path, tensors: Iterable[StoredTensor]
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Yield each tensor with its numbers, read whole; raise Damaged if they were changed."""
    with DataFiles(directory) as files:
        for tensor in tensors:
            numbers = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            pieces = files.pieces((tensor, piece, None) for piece in tensor.pieces)
            for piece, part in zip(tensor.pieces, pieces, strict=True):
                numbers[slices(piece.offset, piece.shape)] = part
            yield tensor, numbers


def nested(directory: Path, stored: Manifest, part: str | None = None) -> dict[str, Any]:
    """Return a part of a state, or all, nested like the saved one; Damaged if it was changed."""
    tensors = [t for t in stored.tensors.values() if part in (None, t.key[0])]
    values = [(key, value) for key, value in stored.values.values() if part in (None, key[0])]
    contents = [*((tensor.key, numbers) for tensor, numbers in whole(directory, tensors)), *values]
    flat = {dotted(key): content for key, content in contents}
    return unflatten_state_dict(flat, {dotted(key): key for key, _ in contents})


def slices(offset: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    """Return the index of a rectangular part of a tensor."""
    spans = zip(offset, shape, strict=True)
    return tuple(slice(first, first + length) for first, length in spans)


def _metadata(stored: Manifest, name: str) -> metadata.STORAGE_TYPES:
    if name in stored.values:
        return metadata.BytesStorageMetadata()
    tensor, size = stored.tensors[name], torch.Size
    properties = metadata.TensorProperties(dtype=getattr(torch, tensor.dtype))
    form = metadata.ChunkStorageMetadata
    chunks = [form(size(part.offset), size(part.shape)) for part in tensor.pieces]
    return metadata.TensorStorageMetadata(properties, size(tensor.shape), chunks)


def _had_no_gradient(name: str, stored: Manifest) -> bool:
    """Return True if this was kept only for other weights: without any gradient, it is zero."""
    optimizer, is_state, quantity = name.partition(".state.")
    if not is_state or name in stored.tensors or name in stored.values:
        return False
    names = [*stored.tensors, *stored.values]
    if not any(other.startswith(f"{optimizer}.param_groups.") for other in names):
        return False  # a module may be called `state` too
    parameter, _, kind = quantity.rpartition(".")
    prefix = f"{optimizer}{is_state}"
    kept = [other.removeprefix(prefix) for other in names if other.startswith(prefix)]
    is_known = any(other.startswith(f"{parameter}.") for other in kept)
    return not is_known and any(other.endswith(f".{kind}") for other in kept)


def _check_cover(items: Iterable[ReadItem], flat: dict[str, Any]) -> None:
    counts: Counter[str] = Counter()
    for item in items:
        counts[item.dest_index.fqn] += math.prod(item.lengths)
    for name, value in flat.items():
        shard = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(shard, torch.Tensor) and counts[name] != shard.numel():
            raise Damaged(f"a part of {name} that this rank needs is missing")


def _compare(directory: Path, stored: Manifest, flat: dict[str, Any], whole: bool) -> None:
    for name, value in flat.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not whole and name not in stored.values and name not in stored.tensors:
            raise Damaged(f"{name} is missing")
        if name not in (stored.tensors if is_tensor else stored.values):
            problem = f"it has no {'tensor' if is_tensor else 'value'} {name}"
        elif is_tensor and stored.tensors[name].shape != tuple(value.shape):
            shape = list(stored.tensors[name].shape)
            problem = f"{name} has the shape {shape}, not {list(value.shape)}"
        else:
            continue
        raise ConfigError(
            f"{directory} does not fit this run: {problem}. It was written by torch "
            f"{stored.facts.get('torch')} (this is {torch.__version__}). Check that "
            "model, optimizer and precision are the same, or use another run.name or directory"
        )


def put(state: dict[str, Any], key: Key, value: Any) -> None:
    """Put a plain value into a nested state."""
    inner: Any = state
    for part in key[:-1]:
        inner = inner[_original_key(inner, part)]
    last = _original_key(inner, key[-1])
    # JSON has only lists; a tuple in the state stays a tuple.
    inner[last] = tuple(value) if isinstance(inner[last], tuple) else value


def _original_key(inner: Any, part: str | int) -> Any:
    """Return the key, such as a number, that DCP has turned into this text."""
    is_renamed = isinstance(inner, dict) and part not in inner
    return next(key for key in inner if str(key) == part) if is_renamed else part
