"""Tensors on several ranks, and on GPUs: https://docs.pytorch.org/docs/stable/notes/cuda.html."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollcall.system import hosts


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which ranks may hold shards; all of them call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def buckets(named: Iterable[tuple[Any, Any]], most: int) -> Iterator[dict[Any, Any]]:
    """Yield named tensors in groups of at most so many bytes together, or of one tensor."""
    bucket, total = dict[Any, Any](), 0
    for name, tensor in named:
        if bucket and total + tensor.nbytes > most:
            yield bucket
            bucket, total = {}, 0
        bucket[name] = tensor
        total += tensor.nbytes
    if bucket:
        yield bucket


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor from the host to a GPU, on the current stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def copy_ahead(batch: Any, stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event]:
    """Begin to copy a batch on a stream of its own; return what `hand_over` takes."""
    with torch.cuda.stream(stream):
        return batch.map(lambda tensor: upload(tensor, stream.device)), stream.record_event()


def hand_over(batch: Any, copied: torch.cuda.Event | None) -> Any:
    """Let the current stream wait for the copy, and keep the memory until it has used it."""
    if copied:
        current = torch.cuda.current_stream()
        current.wait_event(copied)
        for tensor in batch.tensors:
            tensor.record_stream(current)
    return batch


class Copied:
    """A tensor that is being copied to the host, unless it lies there."""

    def __init__(self, values: torch.Tensor) -> None:
        """Begin to copy it; only `read` waits for the GPU."""
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> Any:
        """Return the values as Python's numbers: one, or a list."""
        if self._copied:
            self._copied.synchronize()
        return self._values.tolist()


def chip_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else hosts.processor()
