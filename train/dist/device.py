"""What a GPU does beside the host: copies, streams, events, memory. Without one, nothing waits.

The rules: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from collections.abc import Iterable
from typing import Any

import torch

from rollcall import hosts


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the GPUs that hold these tensors have done what was queued, such as copies."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor from the host to a GPU, on the current stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Ahead:
    """Copies to a GPU on a stream of its own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Begin to copy a batch; return what `hand_over` takes."""
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            moved = batch.map(lambda tensor: upload(tensor, self._device))
            return moved, self._stream.record_event()

    def hand_over(self, batch: Any, copied: torch.cuda.Event | None) -> Any:
        """Let the current stream wait for the copy, and keep the memory until it has used it."""
        if copied:
            current = torch.cuda.current_stream(self._device)
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
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values = host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def read(self) -> Any:
        """Return the values as Python's numbers: one, or a list."""
        if self._copied:
            self._copied.synchronize()
        return self._values.tolist()


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch holds or may still take."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def peaks(device: torch.device) -> tuple[float, float]:
    """Return the most bytes in use and reserved since the last call; begin anew."""
    found = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def release_memory(device: torch.device) -> None:
    """Return what PyTorch keeps for later to the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def chip_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else hosts.processor()
