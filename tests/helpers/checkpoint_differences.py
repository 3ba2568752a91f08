"""The tensors and values in which two checkpoints differ."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Manifest, StoredTensor
from rollcall.train.checkpoint.read import whole


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each tensor and value that differs; it raises as `manifest.read` does."""
    with layout.reading(first), layout.reading(second):
        manifests = a, b = manifest.read_named(first), manifest.read_named(second)
        lines, comparable = [], []
        for name, tensor in a.tensors.items():
            match = b.tensors.get(name)
            if match is None:
                lines.append(f"{name}: only in {first}")
            elif (tensor.dtype, tensor.shape) != (match.dtype, match.shape):
                lines.append(f"{name}: {_describe(tensor)} and {_describe(match)}")
            else:
                comparable.append(name)
        lines += [f"{name}: only in {second}" for name in b.tensors if name not in a.tensors]
        pairs = zip(_whole(first, a, comparable), _whole(second, b, comparable), strict=True)
        for (tensor, left), (_, right) in pairs:
            unequal = _unequal(left, right)
            if unequal:
                wide = torch.complex128 if left.is_complex() else torch.float64
                gap = (left.to(wide) - right.to(wide)).abs().max().item()
                lines.append(
                    f"{tensor.name}: {unequal} of {left.numel()} numbers differ, by {gap:.3g} "
                    "at most"
                )
    for name in {**a.values, **b.values}:
        values = [stored.values.get(name, ("", "nothing"))[1] for stored in manifests]
        if repr(values[0]) != repr(values[1]):
            lines.append(f"{name}: {values[0]} and {values[1]}")
    return lines


def _whole(
    path: Path, stored: Manifest, names: Iterable[str]
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    with manifest.naming(path):
        yield from whole(path, (stored.tensors[name] for name in names))


def _unequal(left: torch.Tensor, right: torch.Tensor) -> int:
    """Count the numbers that differ in any bit: NaN equals itself, and 0 differs from -0."""
    if not left.numel():
        return 0
    width = left.element_size()
    bits = [side.reshape(-1).view(torch.uint8).view(-1, width) for side in (left, right)]
    return int((bits[0] != bits[1]).any(1).sum())


def _describe(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
