"""How does a state come back from disk? DCP finds the boxes that a rank needs; each is checked."""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from train.checkpoint.manifest import Damaged, Manifest, Piece, Stored, open_regular
from train.config import ConfigError


class Files:
    """The data files of a checkpoint, opened when they are first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def piece(self, tensor: Stored, piece: Piece) -> torch.Tensor:
        """The numbers of a piece, on the CPU.

        Raises:
            Damaged: they cannot be read, or differ from their digest.
        """
        data = torch.empty(tensor.size(piece), dtype=torch.uint8)
        try:
            self._fill(data, piece)
        except OSError as error:
            raise Damaged(f"{piece.file} cannot be read: {error.strerror}") from None
        if zlib.crc32(view(data)) != piece.crc32:
            raise Damaged(f"{piece.file} is not what was written: {tensor.name} differs")
        return data.view(getattr(torch, tensor.dtype)).view(piece.shape)

    def _fill(self, data: torch.Tensor, piece: Piece) -> None:
        if piece.file not in self._open:
            descriptor = open_regular(self._directory / piece.file)
            self._stack.callback(os.close, descriptor)
            self._open[piece.file] = descriptor
        rest, start = view(data), piece.start
        while rest:
            count = os.preadv(self._open[piece.file], [rest], start)
            if not count:
                raise Damaged(f"{piece.file} ends too early")
            rest, start = rest[count:], start + count


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which the view keeps alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def load(
    directory: Path,
    stored: Manifest,
    state: dict[str, Any],
    whole: bool = True,
    fill: bool = True,
) -> None:
    """Fill the tensors of `state` in place, and put the values into it.

    Args:
        whole: the checkpoint holds the whole state; otherwise it is seen whether it has enough.
        fill: if not, everything is read and checked, and the state stays as it is.

    Raises:
        Damaged: what was read is not what was written, or not all that this rank needs.
        ConfigError: the checkpoint is of another model.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state)
    flat = planner.state_dict
    _compare(directory, stored, flat, whole)
    metadata = Metadata({name: _metadata(stored, name) for name in flat})
    plan = create_default_local_load_plan(flat, metadata)
    if not whole:
        _check_cover(plan.items, flat)

    def place(item: Any) -> tuple[str, int]:
        if item.type == LoadItemType.BYTE_IO:
            return "", 0
        piece = stored.tensors[item.storage_index.fqn].pieces[item.storage_index.index]
        return piece.file, piece.start

    with Files(directory) as files:
        for item in sorted(plan.items, key=place):
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if fill:
                    _put(state, *stored.values[name])
                continue
            tensor = stored.tensors[name]
            number = item.storage_index.index
            assert number is not None  # of tensors
            numbers = files.piece(tensor, tensor.pieces[number])
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = numbers[tuple(slice(first, first + length) for first, length in spans)]
            if fill:
                planner.resolve_tensor(item).detach().copy_(part)


def whole(directory: Path, tensors: Iterable[Stored]) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Tensors, whole and checked, one after the other.

    Raises:
        Damaged: what was read is not what was written.
    """
    with Files(directory) as files:
        for tensor in tensors:
            numbers = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for piece in tensor.pieces:
                spans = zip(piece.offset, piece.shape, strict=True)
                box = tuple(slice(first, first + length) for first, length in spans)
                numbers[box] = files.piece(tensor, piece)
            yield tensor, numbers


def _metadata(stored: Manifest, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if name in stored.values:
        return BytesStorageMetadata()
    tensor = stored.tensors[name]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, tensor.dtype)),
        torch.Size(tensor.shape),
        [
            ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
            for piece in tensor.pieces
        ],
    )


def _check_cover(items: Iterable[ReadItem], flat: dict[str, Any]) -> None:
    found: Counter[str] = Counter()
    for item in items:
        found[item.dest_index.fqn] += math.prod(item.lengths)
    for name, value in flat.items():
        own = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(own, torch.Tensor) and found[name] != own.numel():
            raise Damaged(f"it does not hold all of {name} that this rank needs")


def _compare(directory: Path, stored: Manifest, flat: dict[str, Any], whole: bool) -> None:
    for name, value in flat.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        problem = ""
        if not whole and name not in stored.values and name not in stored.tensors:
            raise Damaged(f"it holds nothing of {name}")
        if shape is None:
            if name not in stored.values:
                problem = f"it has no value {name}"
        elif name not in stored.tensors:
            problem = f"it has no tensor {name}"
        elif stored.tensors[name].shape != shape:
            problem = f"{name} has the shape {list(stored.tensors[name].shape)}, not {list(shape)}"
        if problem:
            raise ConfigError(
                f"{directory} does not fit this run: {problem}. It was written by torch "
                f"{stored.facts.get('torch')} (this is {torch.__version__}); is it the same model? "
                "Give this run another run.name to start afresh"
            )


def _put(state: dict[str, Any], key: tuple[str | int, ...], value: Any) -> None:
    inner: Any = state
    for part in key[:-1]:
        inner = inner[part]
    # JSON knows lists only; where the state has a tuple it gets one.
    as_before = tuple if isinstance(inner[key[-1]], tuple) else (lambda same: same)
    inner[key[-1]] = as_before(value)
