"""`python -m rollcall.bench checkpoint`: what a save and a load cost, beside torch's ways.

The ways to save take turns, and each save is timed twice: first without training beside it (how
long is the training thread held up, and when is everything on disk?), then with steps beside it.
The ways to load take turns as well, with all files in the page cache.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rollcall.text import table
from rollcall.train.checkpoint.engine import SharedEngine
from rollcall.train.dist.world import World

WIDTH = 2048
"""Rows and columns of each layer's weight."""
BATCH = 32
QUIET_STEPS = 5
"""Steps that are timed without a save, before each round."""


class Timing(NamedTuple):
    """One save, in seconds and steps per second."""

    stall: float  # for which the training thread was held up
    whole: float  # until everything was on disk
    rate: float | None  # of the training beside it; None if it was over before the first step


State = dict[str, Any]
Save = Callable[[Path, State], Iterator[None]]
"""Saves a state: yields once when training may continue, then until the save is finished."""


class Training:
    """A training whose state has the given size."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        """Build layers whose weights and two moments take about this many megabytes."""
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        self._model = model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True)
        self._inputs = torch.randn(BATCH, WIDTH, device=device)
        self._device = device
        self.step()
        moments = {
            f"{number}.{name}": value
            for number, values in enumerate(self._optimizer.state.values())
            for name, value in values.items()
        }
        self.state: State = {"model": self._model.state_dict(), "optim": moments}

    def step(self) -> None:
        """Do one update."""
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(value.nbytes for part in self.state.values() for value in part.values())


def torch_save(directory: Path, state: State) -> Iterator[None]:
    """Save with torch.save, which does not sync."""
    torch.save(state, directory / "state.pt")
    yield


def dcp_save(directory: Path, state: State) -> Iterator[None]:
    """Save with torch.distributed.checkpoint.save, which syncs its files."""
    dcp.save(state, checkpoint_id=directory / "dcp")
    yield


def dcp_async_save(directory: Path, state: State) -> Iterator[None]:
    """Save with torch.distributed.checkpoint.async_save and its defaults."""
    future: Any = dcp.async_save(state, checkpoint_id=directory / "dcp")
    yield
    while not future.done():
        yield
    future.result()


def rollcall_save(world: World, directory: Path) -> Save:
    """Return a way to save to this directory as a training does: begin, then settle every step."""
    checkpoints = SharedEngine(directory, world)

    def save(_: Path, state: State) -> Iterator[None]:
        checkpoints.begin(1, state)
        yield
        while not (result := checkpoints.settle([float(flag) for flag in checkpoints.signals()])):
            yield
        if result.problem:
            raise OSError(result.problem)

    return save


def measure(save: Save, directory: Path, training: Training) -> Timing:
    """Time one save by itself, and one with steps beside it."""
    directory.mkdir()
    began = time.perf_counter()
    saving = save(directory, training.state)
    next(saving)
    stall = time.perf_counter() - began
    for _ in saving:
        time.sleep(0.002)
    whole = time.perf_counter() - began
    shutil.rmtree(directory)
    directory.mkdir()
    saving = save(directory, training.state)
    next(saving)
    steps, began = 0, time.perf_counter()
    for _ in saving:
        training.step()
        steps += 1
    seconds = time.perf_counter() - began
    shutil.rmtree(directory)
    return Timing(stall, whole, steps / seconds if steps else None)


def loads(world: World, directory: Path, state: State) -> dict[str, Callable[[], object]]:
    """Save the state in each format, and return ways to load it; torch.load checks no digests."""
    engine = SharedEngine(directory / "load", world)
    engine.save(1, state)
    torch.save(state, directory / "load.pt")
    dcp.save(state, checkpoint_id=directory / "load.dcp")
    return {
        "torch.load": lambda: torch.load(directory / "load.pt", weights_only=True),
        "dcp.load": lambda: dcp.load(state, checkpoint_id=directory / "load.dcp"),
        "rollcall": lambda: engine.load(1, state),
    }


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def run(megabytes: int, repeats: int, directory: Path, device: str) -> str:
    """Measure every way to save, and return the table; the directory is empty again after that."""
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    world = World.join(device)
    training = Training(megabytes, world.device)
    ways: dict[str, Save] = {
        "torch.save": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save": dcp_async_save,
        "rollcall": rollcall_save(world, directory / "rollcall"),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in ways}
    quiet = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(QUIET_STEPS):
            training.step()
        quiet.append(QUIET_STEPS / (time.perf_counter() - began))
        for name, save in ways.items():
            timings[name].append(measure(save, directory / name, training))
    reading = loads(world, directory, training.state)
    read = [[_seconds(load) for load in reading.values()] for _ in range(repeats + 1)][1:]
    world.leave()
    base = statistics.median(timing.stall for timing in timings["torch.save"])
    rate = statistics.median(quiet)
    title = (
        f"{training.nbytes / 1e6:.0f} MB on {world.device.type}, medians of {repeats} saves; "
        f"an undisturbed step takes {1 / rate:.3f} s"
    )
    rows = [("", "stall", "relative to torch.save", "on disk after", "step rate during the save")]
    for name, found in timings.items():
        stall, whole = (statistics.median(column) for column in list(zip(*found, strict=True))[:2])
        rates = [timing.rate for timing in found if timing.rate]
        beside = f"{statistics.median(rates) / rate:.2f}" if rates else "none"
        rows.append((name, f"{stall:.3f} s", f"{stall / base:.2f}", f"{whole:.2f} s", beside))
    medians = [statistics.median(column) for column in zip(*read, strict=True)]
    load_rows = [("", "load", "relative to torch.load")]
    for name, seconds in zip(reading, medians, strict=True):
        load_rows.append((name, f"{seconds:.3f} s", f"{seconds / medians[0]:.2f}"))
    return "\n".join([title, *table(rows), "", *table(load_rows)])


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rollcall.bench checkpoint",
        description="Measure what a save and a load cost, beside torch's ways.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.directory) as directory:
        print(run(arguments.megabytes, arguments.repeats, Path(directory), arguments.device))
    return 0
