"""What does a save cost? Ours and torch's ways, measured in turn on this machine.

One rank trains a stack of linear layers with AdamW. Each way of saving is timed again and again in
turn. Once with nothing beside it: how long the training thread is held up, and when the save is
whole. And once with steps beside it: how fast they run, relative to steps alone.
"""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from train.checkpoint.checkpointer import Checkpointer
from train.world import World

WIDTH = 2048
ROWS = 32
QUIET_STEPS = 5


class Timing(NamedTuple):
    """One save: seconds, and the rate of steps beside it in steps per second."""

    stall: float
    whole: float
    rate: float | None


State = dict[str, Any]
Way = Callable[[Path, State], Iterator[None]]


class Training:
    """Steps, and the state that they change."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        """Layers whose weights and two moments come to so many megabytes."""
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        self._model = model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True)
        self._inputs = torch.randn(ROWS, WIDTH, device=device)
        self._device = device
        self.step()
        moments = enumerate(self._optimizer.state.values())
        self.state: State = {
            "model": self._model.state_dict(),
            "optim": {
                f"{number}.{name}": value
                for number, values in moments
                for name, value in values.items()
            },
        }

    def step(self) -> None:
        """One update."""
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return sum(value.nbytes for part in self.state.values() for value in part.values())


def torch_save(directory: Path, state: State) -> Iterator[None]:
    """torch.save, not brought to disk."""
    torch.save(state, directory / "state.pt")
    yield


def dcp_save(directory: Path, state: State) -> Iterator[None]:
    """torch.distributed.checkpoint.save, which brings its files to disk."""
    dcp.save(state, checkpoint_id=directory / "dcp")
    yield


def dcp_async_save(directory: Path, state: State) -> Iterator[None]:
    """torch.distributed.checkpoint.async_save with its defaults."""
    future: Any = dcp.async_save(state, checkpoint_id=directory / "dcp")
    yield
    while not future.done():
        yield
    future.result()


def ours(world: World, checkpoints: list[Checkpointer]) -> Way:
    """A save as the training loop does it: begin, then settle after every step."""

    def way(directory: Path, state: State) -> Iterator[None]:
        if not checkpoints:
            checkpoints.append(Checkpointer(directory, world))
        checkpoint = checkpoints[0]
        checkpoint.directory = directory
        checkpoint.begin(1, state)
        yield
        while not (outcome := checkpoint.settle([float(flag) for flag in checkpoint.signals()])):
            yield
        if outcome.problem:
            raise OSError(outcome.problem)

    return way


def measure(way: Way, directory: Path, training: Training) -> Timing:
    """One save alone, and one with steps beside it."""
    directory.mkdir()
    began = time.perf_counter()
    save = way(directory, training.state)
    next(save)
    stall = time.perf_counter() - began
    for _ in save:
        time.sleep(0.002)
    whole = time.perf_counter() - began
    shutil.rmtree(directory)
    directory.mkdir()
    save = way(directory, training.state)
    next(save)
    steps, began = 0, time.perf_counter()
    for _ in save:
        training.step()
        steps += 1
    seconds = time.perf_counter() - began
    shutil.rmtree(directory)
    return Timing(stall, whole, steps / seconds if steps else None)


def run(megabytes: int, repeats: int, directory: Path, device: str) -> str:
    """Measure and return the table; leaves nothing in the directory."""
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    world = World.join(device)
    training = Training(megabytes, world.device)
    ways: dict[str, Way] = {
        "torch.save": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save": dcp_async_save,
        "rollcall": ours(world, []),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in ways}
    quiet = []
    for number in range(repeats):
        began = time.perf_counter()
        for _ in range(QUIET_STEPS):
            training.step()
        quiet.append(QUIET_STEPS / (time.perf_counter() - began))
        for name, way in ways.items():
            timings[name].append(measure(way, directory / f"bench-{name}-{number}", training))
    world.leave()
    base = statistics.median(timing.stall for timing in timings["torch.save"])
    rate = statistics.median(quiet)
    lines = [
        f"{training.nbytes / 1e6:.0f} MB on {world.device.type}, {repeats} saves of each in turn, "
        "medians; steps beside a save relative to steps alone "
        f"({1 / rate:.3f} s each)",
        f"{'':<16}{'held up':>10}{'of torch.save':>15}{'on disk after':>15}{'steps beside':>14}",
    ]
    for name, found in timings.items():
        stall, whole = (statistics.median(column) for column in list(zip(*found, strict=True))[:2])
        rates = [timing.rate for timing in found if timing.rate]
        beside = f"{statistics.median(rates) / rate:.2f}" if rates else "none"
        lines.append(f"{name:<16}{stall:>8.3f} s{stall / base:>15.2f}{whole:>13.2f} s{beside:>14}")
    return "\n".join(lines)
