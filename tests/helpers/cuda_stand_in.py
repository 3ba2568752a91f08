"""A stand-in for CUDA in a process without a GPU: it runs everything late, and reports races.

Inside `with Cuda() as cuda:`, tensors on "cuda" are CPU tensors, of the class `DeviceTensor`. What
is done with them is queued on the current stream, and takes place only when the host waits for it:
so code that waits for too little reads wrong bytes. Each access to memory is also compared with
those before it, by what is ordered before what (as with vector clocks in a race detector), whatever
happens to run first. `cuda.reports` then says

- use before ready: something reads memory that may not have been written yet;
- reuse before done: something writes memory that may still be read or written.

The rules, and where they are written:

- A stream is a queue. Streams of PyTorch do not wait for the default stream, nor it for them; each
  thread has its own current stream. An event stands for what is queued at its newest record, and
  a stream waits for the record that an event has at the call.
  https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
  https://docs.nvidia.com/cuda/cuda-runtime-api/stream-sync-behavior.html
- Memory that is freed goes to the next tensor of the stream that it was allocated on, also if other
  streams still use it, except those that `record_stream` named.
  https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
- A copy with `non_blocking` from or to pinned memory is queued: until it has run, the host may
  neither change its source nor read its destination. From pageable memory the source is staged at
  the call; to pageable memory the host must wait as well. PyTorch keeps pinned memory that is freed
  until the copies have run. https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
- NCCL has a stream of its own. It begins after what is queued on the current stream, and `wait` on
  its work lets the current stream wait, not the host.
  https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations
- An error in a queued operation is raised by a later call that waits, and by every one after it.
  https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#error-checking
- The time between two events is known once both have taken place; otherwise asking is an error.

What it cannot show: kernels, speed, NCCL itself, CUDA graphs, and what C++ does without PyTorch's
dispatcher, such as DataParallel. To the autograd engine these tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

EARLY, REUSED = "use before ready", "reuse before done"
ROUND = 512
"""Bytes; the allocator's smallest block."""
LIKE_VIEWS = {"_unsafe_view", "detach", "alias", "lift_fresh"}
METADATA = {
    "is_same_size",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "is_pinned",
}
COPIES = {"_to_copy", "copy_"}

Order = dict[int, int]
"""By the number of a stream: how many of its operations are ordered before."""


def _join(order: Order, other: Mapping[int, int]) -> None:
    for stream, count in other.items():
        order[stream] = max(order.get(stream, 0), count)


class Marker(NamedTuple):
    """A place in a stream, behind its first `place` operations."""

    stream: Stream
    place: int
    order: Order  # what is ordered before it
    time: list[float]  # when it was passed, if it was

    @property
    def is_passed(self) -> bool:
        return self.stream.done >= self.place


class Stream:
    """A queue of operations: torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:  # noqa: ARG002
        self.cuda = Cuda.now
        self.device = self.cuda.device(device)
        self.number = len(self.cuda.streams)
        self.cuda.streams.append(self)
        self.queue: deque[tuple[Callable[[], object], Marker | None]] = deque()
        self.done = self.count = 0
        self.order: Order = {}

    def add(self, run: Callable[[], object], after: Marker | None = None) -> None:
        """Queue an operation, after a place in another stream."""
        self.queue.append((run, after))
        self.count += 1
        _join(self.order, self.cuda.host)
        self.order[self.number] = self.count

    def mark(self) -> Marker:
        """Return the end of the queue."""
        time: list[float] = []
        self.add(lambda: time.append(self.cuda.time))
        return Marker(self, self.count, dict(self.order), time)

    def wait_for(self, marker: Marker) -> None:
        """Let what is queued from now on wait for a place in a stream."""
        self.add(lambda: None, marker)
        _join(self.order, marker.order)

    def run_one(self) -> None:
        """Run the oldest operation; a failure makes the whole device useless, as on a GPU."""
        run, after = self.queue[0]
        if after:
            self.cuda.run_to(after)
        self.queue.popleft()
        self.done += 1
        self.cuda.time += 1e-3
        if self.cuda.error is None:
            try:
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    run()
            except Exception as error:
                self.cuda.error = error

    def wait_event(self, event: Event) -> None:
        if event.marker:  # without a record there is nothing to wait for
            self.wait_for(event.marker)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_for(stream.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.wait(self.mark())

    def query(self) -> bool:
        return not self.queue

    def is_capturing(self) -> bool:
        return False  # no graphs


class Event:
    """A place in a stream: torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.has_time = enable_timing
        self.marker: Marker | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.marker = (stream or Cuda.now.current_stream()).mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Cuda.now.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.marker:
            Cuda.now.wait(self.marker)

    def query(self) -> bool:
        """Return whether it took place; whoever asks again and again sees the device proceed."""
        if self.marker is None:
            return True
        if not self.marker.is_passed:
            self.marker.stream.run_one()
        if self.marker.is_passed:
            Cuda.now.wait(self.marker)
        return self.marker.is_passed

    def elapsed_time(self, end: Event) -> float:
        if not (self.has_time and end.has_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.marker and end.marker):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.marker.is_passed and end.marker.is_passed):
            raise RuntimeError("CUDA error: device not ready")
        return 1000 * (end.marker.time[0] - self.marker.time[0])


class Access(NamedTuple):
    """An operation's use of a part of a block."""

    start: int
    end: int
    stream: int
    place: int
    writes: bool
    name: str


class Block:
    """Memory of a device, or host memory that a copy uses."""

    def __init__(self, memory: torch.Tensor, stream: Stream | None, pinned: bool = False) -> None:
        self.memory, self.stream, self.pinned = memory, stream, pinned
        self.accesses: list[Access] = []
        self.users: set[Stream] = set()  # named by record_stream
        self.busy: list[Marker] = []  # must be passed before it is used again
        self.used = 0


class Lease:
    """A block while a tensor or a view of it lives."""

    def __init__(self, cuda: Cuda, block: Block) -> None:
        self.cuda, self.block = cuda, block

    def __del__(self) -> None:
        self.cuda.free(self.block)


class DeviceTensor(torch.Tensor):
    """A tensor on a device: its bytes are what the operations that have run so far left."""

    lease: Lease
    plain: torch.Tensor  # the same memory, without the rules
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Cuda.now.dispatch(func, args, kwargs or {})  # of a thread without the mode

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        stream = self.lease.block.stream
        assert stream is not None
        return stream.device

    is_cuda = property(lambda _: True)
    is_cpu = property(lambda _: False)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = Cuda.now.device(device) if device and device.type == "cuda" else device
        if not copy and device in (None, self.device) and dtype in (None, self.dtype):
            return self
        return _moved(self, {"dtype": dtype, "device": device, "non_blocking": non_blocking})

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.lease.block.users.add(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied


class _Move(torch.autograd.Function):
    """A copy whose gradient goes back to the device, which the autograd engine does not know."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, given: Any) -> torch.Tensor:
        ctx.back = tensor.device, tensor.dtype
        found: torch.Tensor = torch.ops.aten._to_copy.default(tensor, **given)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].to(*ctx.back), None


_moved: Callable[..., torch.Tensor] = _Move.apply


class Functions(TorchFunctionMode):
    """What reads host memory without PyTorch's dispatcher."""

    READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__repr__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READERS and not isinstance(args[0], DeviceTensor):
            Cuda.now.touch_on_host(args[0], False, func.__name__)
        if func is torch.Tensor.to:  # without a number it would ask the driver
            args, kwargs = tree_map(_numbered, (args, kwargs or {}))
        return func(*args, **kwargs or {})


class Dispatches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Cuda.now.dispatch(func, args, kwargs or {})


class Cuda:
    """The devices, their memory and the streams, and what was found wrong."""

    now: Cuda

    def __init__(self, devices: int = 1, capacity: int = 2**30) -> None:
        """Make devices with so many bytes each."""
        self.devices, self.capacity = devices, capacity
        self.capability = 9, 0
        self.reports: list[str] = []
        self.streams: list[Stream] = []
        self.host: Order = {}  # what the host knows to be done
        self.time = 0.0  # seconds; each operation takes a millisecond
        self.error: Exception | None = None
        self.waits = 0  # how often the host has waited
        self.blocks: dict[int, Block] = {}  # by the address of their memory
        self.cached: dict[int, list[Block]] = defaultdict(list)  # free blocks of each device
        self.allocated, self.reserved = [0] * devices, [0] * devices  # bytes
        self.peaks = [[0, 0] for _ in range(devices)]
        self.ranges: list[str] = []  # of nvtx, open now
        self.joined: tuple[str, Any] = "", None  # the backend of the process group, and its GPU
        self.log: list[str] = []  # calls that only a tool outside sees
        self.generators = [torch.Generator().manual_seed(n) for n in range(devices)]
        self.others = 1  # by which sums are multiplied, for ranks that are not there
        self._current = threading.local()
        self._lock = threading.RLock()
        self._patches = contextlib.ExitStack()

    # Streams

    def device(self, device: Any = None) -> torch.device:
        """Return a device with its number."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        index = torch.device(device).index if device is not None else None
        return torch.device("cuda", self.current_device() if index is None else index)

    def current_device(self) -> int:
        return getattr(self._current, "device", 0)  # each thread begins with the first

    def set_device(self, device: Any) -> None:
        self._current.device = self.device(device).index

    def current_stream(self, device: Any = None) -> Stream:
        index = self.device(device).index
        found: Stream = getattr(self._current, "streams", {}).get(index, self.default[index])
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        device, streams = self.current_device(), getattr(self._current, "streams", {})
        self._current.device = stream.device.index
        self._current.streams = streams | {stream.device.index: stream}
        try:
            yield
        finally:
            self._current.device, self._current.streams = device, streams

    def run_to(self, marker: Marker) -> None:
        """Run a stream up to a place."""
        while not marker.is_passed:
            marker.stream.run_one()

    def wait(self, marker: Marker) -> None:
        """Let the host wait, and hear of errors."""
        with self._lock:
            self.waits += 1
            self.run_to(marker)
            _join(self.host, marker.order)
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}") from self.error

    def synchronize(self, device: Any = None) -> None:
        index = self.device(device).index
        for stream in self.streams[:]:
            if stream.device.index == index:
                stream.synchronize()

    # Memory

    def allocate(self, size: int, stream: Stream) -> Block:
        """Return memory, the newest that is free on this stream if it fits."""
        index, size = stream.device.index, max(1, -(-size // ROUND)) * ROUND
        found = None
        for block in reversed(self.cached[index]):
            if block.stream is stream and len(block.memory) == size and self._is_free(block):
                found = block
                self.cached[index].remove(block)
                break
        if found is None:
            if self.reserved[index] + size > self.capacity:
                self.synchronize(index)
                self.empty_cache()
            if self.reserved[index] + size > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            found = Block(torch.full((size,), 255, dtype=torch.uint8), stream)
            self.blocks[found.memory.data_ptr()] = found
            self.reserved[index] += size
        found.used = size
        self.allocated[index] += size
        held = self.allocated[index], self.reserved[index]
        self.peaks[index] = [*map(max, zip(self.peaks[index], held, strict=True))]
        return found

    def free(self, block: Block) -> None:
        """Keep a block for the next tensor of its stream."""
        assert block.stream is not None
        index = block.stream.device.index
        self.allocated[index] -= block.used
        users = [user for user in block.users - {block.stream} if user.queue]
        block.busy = [user.mark() for user in users]
        block.users = set()
        self.cached[index].append(block)

    def _is_free(self, block: Block) -> bool:
        if not all(marker.is_passed for marker in block.busy):
            return False
        for marker in block.busy:  # the allocator asks the event, on the host
            _join(self.host, marker.order)
        block.busy = []
        return True

    def empty_cache(self) -> None:
        for index, blocks in self.cached.items():
            if blocks:
                self.synchronize(index)  # as cudaFree does
            for block in blocks:
                self.reserved[index] -= len(block.memory)
                del self.blocks[block.memory.data_ptr()]
            blocks.clear()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        index = self.device(device).index
        self.peaks[index] = [self.allocated[index], self.reserved[index]]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.capacity - self.reserved[self.device(device).index], self.capacity

    def _capture(self, what: str) -> None:
        self.log.append(what)
        if any(stream.queue for stream in self.streams):
            self.reports.append(f"{EARLY}: the profiler misses what runs after its {what}")

    def _dump(self, path: str) -> None:
        self.log.append("dump")
        Path(path).write_bytes(pickle.dumps({"segments": self.reserved, "device_traces": []}))

    def host_block(self, tensor: torch.Tensor, pinned: bool = False) -> Block:
        """Return the block of host memory; it is watched from now on, and lives as long as this."""
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        found = self.blocks.setdefault(storage.data_ptr(), Block(memory, None))
        found.pinned |= pinned
        return found

    # Accesses

    def touch(self, tensor: torch.Tensor, writes: bool, stream: Stream | None, name: str) -> None:
        """Compare the use of a tensor, by a stream or the host, with all before it; note it."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or tensor.numel() == 0:
            return
        start = tensor.storage_offset() * tensor.element_size()
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        end = start + (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
        known, own = (stream.order, stream.number) if stream else (self.host, -1)
        where = f"stream {own}" if stream else "the host"
        kept = []
        for other in block.accesses:
            is_known = other.stream == own or known.get(other.stream, 0) >= other.place
            if other.start < end and start < other.end and (writes or other.writes):
                if not is_known:
                    kind = EARLY if other.writes and not writes else REUSED
                    self.reports.append(
                        f"{kind}: {name} on {where} {'writes' if writes else 'reads'} what "
                        f"{other.name} on stream {other.stream} may still "
                        f"{'write' if other.writes else 'read'}"
                    )
                elif writes and start <= other.start and other.end <= end:
                    continue  # whoever comes after this one comes after that one
            kept.append(other)
        if stream:
            kept.append(Access(int(start), int(end), own, stream.count, writes, name))
        block.accesses = kept

    def touch_on_host(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        """Do so for the host, if the tensor lies in memory that copies use."""
        if self.blocks.get(_plain(tensor).untyped_storage().data_ptr()):
            self.touch(_plain(tensor), writes, None, name)

    # Operations

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation of PyTorch on the host, or queue it."""
        with self._lock, torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        on_device = [one for one in leaves if isinstance(one, DeviceTensor)]
        target = kwargs.get("device")
        pins = bool(kwargs.pop("pin_memory", False))
        to_device = target is not None and torch.device(target).type == "cuda"
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs, name, pins)
        if torch.Tag.inplace_view in func.tags:  # such as squeeze_
            func(*tree_map(_plain, args), **kwargs)
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
            return args[0]
        if func.is_view or name in LIKE_VIEWS | METADATA:
            found = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
            lease = on_device[0].lease
            return tree_map_only(torch.Tensor, lambda one: _wrap(one, lease), found)
        device = self.device(target) if to_device else on_device[0].device
        if func.namespace == "c10d":
            self.synchronize(device)
            func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if name in COPIES:
            return self._copy(func, args, kwargs, name, device, pins)
        if target is not None and not to_device:
            return self._on_host(func, tree_map(_meta, args), kwargs, name, pins)  # empty_like
        for one in leaves:
            if not isinstance(one, DeviceTensor) and one.ndim and not to_device:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on {device}, got one on cpu"
                )
        if len({one.device for one in on_device}) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        return self._queue(func, args, kwargs, name, self.current_stream(device))

    def _on_host(self, func: Any, args: Any, kwargs: Any, name: str, pins: bool) -> Any:
        if not (func.is_view or name in LIKE_VIEWS | METADATA):
            for one, writes in _uses(func, args, kwargs):
                self.touch_on_host(one, writes, name)
        found = func(*args, **kwargs)
        if pins:
            self.host_block(found, pinned=True)
        return found

    def _queue(self, func: Any, args: Any, kwargs: Any, name: str, stream: Stream) -> Any:
        """Queue an operation; return what will be its results."""
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        uses = list(_uses(func, args, kwargs))
        for one, _ in uses:
            if not isinstance(one, DeviceTensor):  # a number is passed by value
                self.touch_on_host(one, False, name)
        plain, named = tree_map(_argument, (args, kwargs))
        changed = [one for one, writes in uses if writes]
        results: Any = None
        try:
            known = {"device": "meta"} if "device" in kwargs else {}
            shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs) | known)
            is_known = all(isinstance(one, torch.Tensor) for one in tree_leaves(shapes))
        except (NotImplementedError, RuntimeError):
            shapes, is_known = None, False
        seed = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed = int(torch.randint(2**62, (), generator=self.generators[stream.device.index]))

        def run() -> Any:
            with _seeded(seed):
                return func(*plain, **named)

        if not is_known and not changed:  # such as item: the host waits for the result
            self._note(uses, stream, name)
            stream.add(lambda: None)
            self.wait(stream.mark())
            found = run()
            return tree_map_only(torch.Tensor, lambda one: self.upload(one, stream), found)
        if not changed:
            results = tree_map_only(torch.Tensor, lambda one: self.empty(one, stream), shapes)
            uses += [(one, True) for one in tree_leaves(results)]
        self._note(uses, stream, name)
        filled = [_argument(one) for one in tree_leaves(results)] if not changed else []

        def compute() -> None:
            found = run()
            for one, value in zip(filled, tree_leaves(found) if filled else [], strict=True):
                one.copy_(value)

        if not name.startswith(("empty", "new_empty")):
            stream.add(compute)
        if changed:
            returned = func._schema.returns
            return None if not returned else changed[0] if len(returned) == 1 else tuple(changed)
        return results

    def _copy(
        self, func: Any, args: Any, kwargs: Any, name: str, device: torch.device, pins: bool
    ) -> torch.Tensor:
        target: torch.Tensor
        if name == "copy_":
            target, source = args[:2]
            late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        else:
            source, late = args[0], kwargs.get("non_blocking", False)
            to = kwargs.get("device")
            shape = func(_meta(source), dtype=kwargs.get("dtype"))
            if to is not None and torch.device(to).type == "cpu":
                target = torch.full_like(shape, 77, device="cpu")
                self.host_block(target, pins)
            else:
                target = self.empty(shape, self.current_stream(device))
        if isinstance(source, DeviceTensor):
            device = source.device
        stream = self.current_stream(device)
        from_, into = _plain(source).detach(), _plain(target).detach()
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            if target.device != device:  # PyTorch lets the two streams wait for each other
                stream.wait_stream(self.current_stream(target.device))
        elif isinstance(target, DeviceTensor):
            if from_.ndim == 0 or not self.host_block(from_).pinned:
                self.touch_on_host(from_, False, name)
                from_ = from_.clone()  # staged by the call
        else:
            self.host_block(into)
        self._note([(from_, False), (into, True)], stream, name)
        stream.add(lambda: into.copy_(from_))
        if isinstance(target, DeviceTensor) and target.device != device:
            self.current_stream(target.device).wait_stream(stream)
        if not late and not (isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor)):
            self.wait(stream.mark())
        return target

    def _note(self, uses: list[tuple[torch.Tensor, bool]], stream: Stream, name: str) -> None:
        """Note the accesses of the operation that is queued next."""
        _join(stream.order, self.host)
        stream.count += 1  # its number
        for one, writes in uses:
            self.touch(_plain(one), writes, stream, name)
        stream.count -= 1

    def empty(self, like: torch.Tensor, stream: Stream) -> DeviceTensor:
        """Return a tensor on the stream's device with the form of another; its bytes are old."""
        size = like.element_size() * (
            1 + sum((n - 1) * step for n, step in zip(like.size(), like.stride(), strict=True))
        )
        block = self.allocate(size, stream)
        plain = torch.empty(0, dtype=like.dtype)
        plain.set_(block.memory.untyped_storage(), 0, like.size(), like.stride())
        return _wrap(plain, Lease(self, block))

    def upload(self, value: torch.Tensor, stream: Stream) -> DeviceTensor:
        """Return a result that is known already on the device."""
        found = self.empty(value, stream)
        _plain(found).copy_(value)
        return found

    # NCCL

    def collective(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that NCCL's stream does if its first tensor is on a device."""

        def queued(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not isinstance(tensor, DeviceTensor):
                return real(tensor, *args, async_op=async_op, **kwargs)
            current, nccl = self.current_stream(tensor.device), self.nccl[tensor.device.index]
            nccl.wait_stream(current)
            self._note([(tensor, True)], nccl, real.__name__)

            def run() -> None:
                real(_plain(tensor), *args, **kwargs)
                _plain(tensor).mul_(self.others)

            nccl.add(run)
            end = nccl.mark()
            work = SimpleNamespace(wait=lambda: self.current_stream(tensor.device).wait_for(end))
            work.tensor = tensor  # until the work is gone, its memory is kept
            return work if async_op else work.wait()

        return queued

    # The place of torch.cuda

    def __enter__(self) -> Self:
        Cuda.now = self
        self.default = [Stream(n) for n in range(self.devices)]
        self.nccl = [Stream(n) for n in range(self.devices)]
        patch = self._patches.enter_context(pytest.MonkeyPatch.context())
        for name, value in self._names().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.accelerator, "current_stream", self.current_stream)
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped)
        memory, history = torch.cuda.memory, "_record_memory_history"
        patch.setattr(memory, "_dump_snapshot", self._dump)
        patch.setattr(memory, history, lambda *_, **__: self.log.append("history"))
        patch.setattr(torch.cuda.nvtx, "range_push", self.ranges.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", self.ranges.pop)
        patch.setattr(torch.cuda.profiler, "start", lambda: self._capture("start"))
        patch.setattr(torch.cuda.profiler, "stop", lambda: self._capture("stop"))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: self._pinned(tensor))
        patch.setattr(dist, "all_reduce", self.collective(dist.all_reduce))
        join = dist.init_process_group

        def join_on(backend: str, device_id: Any = None, **given: Any) -> None:
            self.joined = backend, device_id  # NCCL's part is here
            join("gloo", **given)

        patch.setattr(dist, "init_process_group", join_on)
        # Else a module keeps its parameters, and takes over the bytes only.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        self._patches.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        self._patches.enter_context(Functions())
        self._patches.enter_context(Dispatches())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DeviceTensor):
            raise RuntimeError("cannot pin a tensor on cuda: only dense CPU tensors can be pinned")
        copied = tensor.clone()
        self.host_block(copied, pinned=True)
        return copied

    def _names(self) -> dict[str, Any]:
        def index(device: Any = None) -> int:
            found: int = self.device(device).index
            return found

        return {
            "Stream": Stream,
            "Event": Event,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default[index(device)],
            "current_device": self.current_device,
            "set_device": self.set_device,
            "synchronize": self.synchronize,
            "is_current_stream_capturing": lambda: False,
            "is_bf16_supported": lambda *_: True,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: self.devices,
            "get_device_name": lambda _=None: "NVIDIA stand-in",
            "get_device_properties": lambda _=None: SimpleNamespace(
                total_memory=self.capacity, multi_processor_count=1, major=9
            ),
            "get_device_capability": lambda _=None: self.capability,
            "empty_cache": self.empty_cache,
            "mem_get_info": self.mem_get_info,
            "memory_allocated": lambda device=None: self.allocated[index(device)],
            "memory_reserved": lambda device=None: self.reserved[index(device)],
            "max_memory_allocated": lambda device=None: self.peaks[index(device)][0],
            "max_memory_reserved": lambda device=None: self.peaks[index(device)][1],
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "default_generators": self.generators,
            "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in self.generators],
            "get_rng_state": lambda device=None: self.generators[index(device)].get_state(),
            "set_rng_state": lambda state, device=None: self.generators[index(device)].set_state(
                state
            ),
        }


def _plain(tensor: Any) -> Any:
    """Return the same memory as a tensor of the host."""
    return tensor.plain if isinstance(tensor, DeviceTensor) else tensor


def _wrap(plain: torch.Tensor, lease: Lease) -> DeviceTensor:
    found: DeviceTensor = torch.Tensor._make_subclass(DeviceTensor, plain)
    found.plain, found.lease = plain, lease
    return found


def _grouped(lists: Any, _: bool = False) -> dict[tuple[torch.device, torch.dtype], Any]:
    """Group the tensors at the same place of several lists, as optimizers do."""
    found: dict[tuple[torch.device, torch.dtype], Any] = {}
    for place, first in enumerate(lists[0]):
        group, places = found.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        places.append(place)
        for column, given in zip(group, lists, strict=True):
            column += given[place : place + 1]
    return found


def _numbered(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value) == "cuda"
    return Cuda.now.device() if is_cuda else value


def _argument(value: Any) -> Any:
    """Return an argument as a kernel gets it: its form of now, and numbers from the host."""
    if isinstance(value, DeviceTensor):
        return value.plain.detach()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _meta(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    form = tensor.size(), tensor.stride()
    return torch.empty_strided(*form, dtype=tensor.dtype, device="meta")


def _uses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors that an operation uses, and whether it writes them."""
    for place, about in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(about.name)
        writes = about.alias_info is not None and about.alias_info.is_write
        for one in tree_leaves(value):
            if isinstance(one, torch.Tensor):
                yield one, writes


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices
        yield
