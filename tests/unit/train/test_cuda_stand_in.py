"""Code for GPUs waits for what it must, and a stand-in for CUDA finds where code does not."""

from __future__ import annotations

import inspect
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cuda_stand_in import EARLY, REUSED, Cuda
from user_datasets import SIZE, Noisy

from rollcall.config.schema import Data
from rollcall.train.checkpoint.background import PinnedBuffer, ThreadJob
from rollcall.train.checkpoint.engine import Engine, restore
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.source import Batch, Source
from rollcall.train.profiling import profiler
from rollcall.train.ranks import device as seam
from rollcall.train.ranks.agreement import Agreement
from rollcall.train.ranks.clock import FORWARD, OPTIMIZER, Clock
from rollcall.train.ranks.device import Copied
from rollcall.train.ranks.world import World
from rollcall.train.recovery import micro_batch

GPU = torch.device("cuda", 0)


def loading(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    source = Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)
    order = Order(SIZE, 2 * SIZE, 16, seed=1)
    found = []
    for device, workers in ((torch.device("cpu"), 0), (GPU, 0), (GPU, 1)):
        batches = Loading(Data(num_workers=workers), seed=7, device=device)
        sums = []
        for batch in training_batches(source, order, range(16), range(order.steps), batches):
            sums.append(batch.inputs.square().sum(0) + batch.weights.sum())
        found.append(torch.stack(sums).cpu())
    assert torch.equal(*found[:2]) and torch.equal(*found[1:])


class Reporter:
    """A member with numbers on the device and on the host."""

    def __init__(self, cuda: Cuda) -> None:
        self._step, self._cuda = torch.zeros((), device=GPU), cuda
        self.waits = 0

    def report(self) -> Mapping[str, Any]:
        self.waits = self._cuda.waits
        self._step = self._step + 1
        host = torch.arange(3.0, dtype=torch.float64)
        return {"a": self._step, "b": self._step * torch.ones(2, device=GPU), "c": host, "d": 4.0}


def agreement(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    cuda.others = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: 2)
        patch.setattr("rollcall.train.ranks.agreement.SPACING", 1e6)  # only what is due is sent
        member = Reporter(cuda)
        one, agreed = Agreement([member.report], GPU), []

        def receive(now: bool = False) -> None:
            if exchange := one.receive(now):
                assert cuda.waits > member.waits
                agreed.append((exchange.step, *exchange.sums))

        for step in range(1, 6):
            receive()
            before = cuda.waits
            one.send(step, torch.zeros((), device=GPU) > 0, is_due=step % 2 == 1)
            assert cuda.waits == before, "to begin an exchange, nobody waits for the GPU"
        receive(now=True)
    expected = [
        (step, {"a": 2.0 * n, "b": [2.0 * n] * 2, "c": [0.0, 2.0, 4.0], "d": 8.0})
        for n, step in enumerate((1, 3, 5), 1)
    ]
    assert agreed == expected


class LateThread(ThreadJob):
    """A writer that begins when somebody has asked for its result three times."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._late, self._asked = threading.Event(), 0
        super().__init__(lambda: (self._late.wait(20), work()))

    def poll(self) -> str | None:
        self._asked += 1
        if self._asked > 3:
            self._late.set()
        return super().poll()


def checkpoint(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    on_gpu = World(world.place, GPU)
    weights = {"a": torch.zeros(1000, device=GPU), "b": torch.zeros(3, 5, device=GPU)}
    engine = Engine(CheckpointStore(path, on_gpu, keep=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollcall.train.checkpoint.engine.ThreadJob", LateThread)
        for step in (1, 2, 3):
            for weight in weights.values():
                weight.add_(step)
            engine.begin(step, {"model": weights})
            for weight in weights.values():  # the training continues
                weight.mul_(2)
            end = time.monotonic() + 20
            while engine.busy and time.monotonic() < end:
                result = engine.settle(engine.signals())
                assert result is None or not result.problem

    def fresh() -> dict[str, Any]:
        return {"model": {"a": torch.zeros(1000), "b": torch.zeros(3, 5)}}

    values = []
    for step in (3, 2, 1):
        loaded = restore([Engine(CheckpointStore(path, world, keep=3))], fresh)
        assert loaded
        assert loaded.step == step
        values += [float(one.mean()) for one in loaded.state["model"].values()]
        engine.refuse(step, "")
    assert values == [11.0, 11.0, 4.0, 4.0, 1.0, 1.0]


def two_gpus(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    tensors = [torch.full((100,), n + 1.0, device=torch.device("cuda", n)) for n in (0, 1)]
    found = [torch.frombuffer(one, dtype=torch.float32) for one in PinnedBuffer().copy(tensors)]
    assert [float(one.mean()) for one in found] == [1.0, 2.0]
    assert [Copied(one.sum()).read() for one in tensors] == [100.0, 200.0]


def phases(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    clock = Clock()
    x = torch.zeros(10, device=GPU)
    with clock.running(GPU):
        for _ in range(20):
            clock.enter(FORWARD)
            for _ in range(8):
                x += 1
            clock.enter(OPTIMIZER)
            for _ in range(2):
                x += 1
            clock.step()
        x.sum().item()
    steps, seconds = clock.totals()
    assert steps == 20
    assert seconds[FORWARD] == pytest.approx(20 * 0.009), "eight operations and a mark"
    assert seconds[OPTIMIZER] == pytest.approx(20 * 0.003)
    clock.start(torch.device("cpu"))


def memory(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    on_gpu = World(world.place, GPU)

    def fits(batch: Batch) -> bool:
        try:
            rows = [batch.inputs * n for n in range(4)]
        except torch.OutOfMemoryError:
            return False
        return len(rows) == 4

    inputs = torch.zeros(1000, 2**10, device=GPU)  # 4 KiB a row, and four copies of it
    cuda.capacity = inputs.nbytes + 4 * 300 * 2**12
    batch = Batch(inputs, torch.zeros(1000, device=GPU), torch.ones(1000, device=GPU))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "MARGIN", 0.0)
        patch.setattr(micro_batch, "CLOSE", 1.0)  # all are fast enough
        found = micro_batch.search(on_gpu, fits, batch)
    assert found is not None
    assert 280 <= found.size <= 300


def nsight(cuda: Cuda, world: World, path: Path) -> None:  # noqa: ARG001
    run: Any = SimpleNamespace(world=World(world.place, GPU))
    x = torch.zeros(10, device=GPU) + 1
    one = profiler._Nsight(run, 1)
    x += 1
    one._enter(FORWARD)
    x += 1
    one.end(2)
    assert cuda.log == ["start", "stop"]
    assert not cuda.ranges


SCENARIOS = [loading, agreement, checkpoint, two_gpus, phases, memory, nsight]


class Mistake(NamedTuple):
    """A change of a function of the product that breaks a rule of CUDA."""

    name: str
    scenario: Callable[[Cuda, World, Path], None]
    function: Any
    old: str
    new: str
    expected: str = ""  # in a report; else the scenario notices it itself


WAIT = "current.wait_event(copied)"
MOVED = "batch.map(lambda tensor: upload(tensor, stream.device)), stream.record_event()"
MISTAKES = [
    Mistake("the batch is not waited for", loading, seam.hand_over, WAIT, "pass", EARLY),
    Mistake(
        "the wrong stream waits",
        loading,
        seam.hand_over,
        WAIT,
        "torch.cuda.Stream().wait_event(copied)",
        EARLY,
    ),
    Mistake(
        "an event that nobody recorded is waited for",
        loading,
        seam.hand_over,
        WAIT,
        "current.wait_event(torch.cuda.Event())",
        EARLY,
    ),
    Mistake(
        "no record_stream",
        loading,
        seam.hand_over,
        "tensor.record_stream(current)",
        "pass",
        REUSED,
    ),
    Mistake(
        "record_stream names a stream that does not use the memory",
        loading,
        seam.hand_over,
        "tensor.record_stream(current)",
        "tensor.record_stream(torch.cuda.Stream())",
        REUSED,
    ),
    Mistake(
        "the event is recorded before the copy",
        loading,
        seam.copy_ahead,
        "return " + MOVED,
        "event = stream.record_event()\n"
        "        return batch.map(lambda tensor: upload(tensor, stream.device)), event",
        EARLY,
    ),
    Mistake(
        "the event is recorded on another stream",
        loading,
        seam.copy_ahead,
        MOVED,
        MOVED.replace("stream.record", "torch.cuda.default_stream().record"),
        EARLY,
    ),
    Mistake(
        "all batches share a pinned buffer",
        loading,
        seam.upload,
        "tensor.pin_memory()",
        "globals().setdefault(f'pinned {tensor.shape}', tensor.pin_memory()).copy_(tensor)",
        REUSED,
    ),
    Mistake(
        "a batch is copied in the stream that computes, and waited for",
        agreement,
        seam.upload,
        "non_blocking=True",
        "non_blocking=False",
    ),
    Mistake(
        "the host reads a number before it has come",
        agreement,
        Copied.read,
        "self._copied.synchronize()",
        "pass",
        EARLY,
    ),
    Mistake(
        "the host asks whether a number has come, and does not wait",
        agreement,
        Copied.read,
        "self._copied.synchronize()",
        "self._copied.query()",
        EARLY,
    ),
    Mistake(
        "the event is on a stream that copies nothing",
        agreement,
        Copied.__init__,
        "torch.cuda.current_stream(values.device).record_event()",
        "torch.cuda.Stream(values.device).record_event()",
        EARLY,
    ),
    Mistake(
        "the event is recorded before the number is copied",
        agreement,
        Copied.__init__,
        "self._values.copy_(values, non_blocking=True)\n",
        "self._copied = torch.cuda.current_stream(values.device).record_event()\n"
        "        self._values.copy_(values, non_blocking=True); return\n",
        EARLY,
    ),
    Mistake(
        "the sum is read while NCCL adds",
        agreement,
        Agreement._exchange,
        "work.wait()",
        "pass",
        EARLY,
    ),
    Mistake(
        "the checkpoint is written while it is copied",
        checkpoint,
        PinnedBuffer.copy,
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
    ),
    Mistake(
        "the next checkpoint takes the buffer before this one is written",
        checkpoint,
        ThreadJob.poll,
        "return self._problem",
        "return self._problem or ''",
    ),
    Mistake(
        "the current GPU alone is waited for",
        two_gpus,
        PinnedBuffer.copy,
        "torch.cuda.current_stream(device)",
        "torch.cuda.current_stream()",
    ),
    Mistake(
        "the event is on the current GPU, not on the one that copies",
        two_gpus,
        Copied.__init__,
        "current_stream(values.device)",
        "current_stream()",
        EARLY,
    ),
    Mistake(
        "a time is read before the events took place",
        phases,
        Clock._drain,
        "and self._marks[1][1].query()",
        "",
    ),
    Mistake(
        "an event is used again while it is waited for",
        phases,
        Clock._drain,
        "pool.append(begun)",
        "pool.append(ended)",
    ),
    Mistake(
        "the profiler stops before the kernels",
        nsight,
        profiler._Nsight.end,
        "torch.cuda.synchronize()",
        "pass",
        EARLY,
    ),
]


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[Mistake]:
    """A mistake, while the function has it, wherever it was imported."""
    mistake: Mistake = request.param
    function = mistake.function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mistake.old) == 1, f"{function} has changed:\n{source}"
    names: dict[str, Any] = {}
    exec(source.replace(mistake.old, mistake.new), function.__globals__, names)
    before, function.__code__ = function.__code__, names[function.__name__].__code__
    yield mistake
    function.__code__ = before


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_the_code_waits_for_what_it_must(
    scenario: Callable[[Cuda, World, Path], None], world: World, tmp_path: Path
) -> None:
    with Cuda(devices=2) as cuda:
        scenario(cuda, world, tmp_path)
        cuda.synchronize()
    assert not cuda.reports


@pytest.mark.parametrize("planted", MISTAKES, ids=lambda one: one.name, indirect=True)
def test_a_planted_mistake_is_found(planted: Mistake, world: World, tmp_path: Path) -> None:
    noticed = ""
    with Cuda(devices=2) as cuda:
        try:
            planted.scenario(cuda, world, tmp_path)
        except Exception as error:
            noticed = repr(error)
    if planted.expected:
        assert any(planted.expected in report for report in cuda.reports), (noticed, cuda.reports)
    else:
        assert noticed


def test_communication_that_no_kernel_hides_is_exposed() -> None:
    kernels = [
        {"name": "gemm", "ts": 0, "dur": 10},
        {"name": "ncclDevKernel_AllReduce", "ts": 5, "dur": 15},
        {"name": "gemm", "ts": 18, "dur": 10},
    ]
    assert profiler._exposed(kernels) == pytest.approx(8e-6)
