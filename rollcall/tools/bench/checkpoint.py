"""`rollcall bench checkpoint`: what a save and a load cost, beside torch's ways.

The ways to save take turns, and each save is timed twice: first without training beside it (how
long is the training thread held up, and when is everything on disk?), then with steps beside it.
The ways to load take turns as well, with all files in the page cache.
"""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rollcall.messages.text import duration
from rollcall.tools.bench import turns
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.ranks.device import synchronize
from rollcall.train.ranks.world import World

WIDTH = 2048
"""Rows and columns of each layer's weight."""
BATCH = 32
QUIET_STEPS = 5
"""Steps that are timed without a save, before each save."""
State = dict[str, Any]
Save = Callable[[Path, State], Iterator[None]]
"""Saves a state: yields once when training may continue, then until the save is finished."""


class Training:
    """A training whose weights and two moments have about the given size."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        """Do a first update, which makes the moments."""
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        self._model = model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True)
        self._inputs = torch.randn(BATCH, WIDTH, device=device)
        self.step()
        moments = [each for of_one in self._optimizer.state.values() for each in of_one.values()]
        self.tensors = [weight.detach() for weight in self._model.parameters()] + moments
        self.state: State = {"all": {str(n): each for n, each in enumerate(self.tensors)}}

    def step(self) -> None:
        """Do one update."""
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        synchronize(self._inputs.device)


def at_once(save: Callable[[State, Path], object]) -> Save:
    """Return a way to save that is finished before training may continue."""

    def saving(directory: Path, state: State) -> Iterator[None]:
        save(state, directory)
        yield

    return saving


def dcp_async_save(directory: Path, state: State) -> Iterator[None]:
    """Save with torch.distributed.checkpoint.async_save and its defaults."""
    future: Any = dcp.async_save(state, checkpoint_id=directory / "dcp")
    yield
    while not future.done():
        yield
    future.result()


def rollcall_save(world: World, directory: Path) -> Save:
    """Return a way to save to this directory as a training does: begin, then settle every step."""
    checkpoints = Engine(CheckpointStore(directory, world))

    def save(_: Path, state: State) -> Iterator[None]:
        checkpoints.begin(1, state)
        yield
        while not (result := checkpoints.settle([float(flag) for flag in checkpoints.signals()])):
            yield
        if result.problem:
            raise OSError(result.problem)

    return save


def measure(save: Save, directory: Path, training: Training) -> turns.Figures:
    """Time one save by itself, then steps, and a save with steps beside it."""
    directory.mkdir()
    os.sync()  # what others wrote and deleted
    began = time.perf_counter()
    saving = save(directory, training.state)
    next(saving)
    stall = time.perf_counter() - began
    for _ in saving:
        time.sleep(0.002)
    whole = time.perf_counter() - began
    shutil.rmtree(directory)
    directory.mkdir()
    quiet = _rate(training, range(QUIET_STEPS))
    saving = save(directory, training.state)
    next(saving)
    beside = _rate(training, saving)
    shutil.rmtree(directory)
    return {"stall": stall, "whole": whole, "rate": beside / quiet}


def _rate(training: Training, times: Iterable[object]) -> float:
    """Return the steps per second, of a step for each of `times`."""
    steps, began = 0, time.perf_counter()
    for _ in times:
        training.step()
        steps += 1
    return steps / (time.perf_counter() - began)


def loads(world: World, directory: Path, state: State) -> dict[str, Callable[[], object]]:
    """Save the state in each format, and return ways to load it; torch.load checks no digests."""
    engine = Engine(CheckpointStore(directory / "load", world))
    engine.begin(1, state)
    engine.drain()
    torch.save(state, directory / "load.pt")
    dcp.save(state, checkpoint_id=directory / "load.dcp")
    return {
        "torch.load": lambda: torch.load(directory / "load.pt", weights_only=True),
        "dcp.load": lambda: dcp.load(state, checkpoint_id=directory / "load.dcp"),
        "rollcall": lambda: engine.load(1, state),
    }


def _seconds(load: Callable[[], object], _: int) -> turns.Figures:
    began = time.perf_counter()
    load()
    return {"load": time.perf_counter() - began}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its tables; return the exit code."""
    words = turns.parser("checkpoint", __doc__)
    words.add_argument("--megabytes", type=int, default=512, help="size of the state")
    words.add_argument("--directory", type=Path, default=Path(), help="where to write")
    words.add_argument("--device", default="cpu", help="cpu or cuda")
    options = words.parse_args(argv)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    world = World.join(options.device)
    training = Training(options.megabytes, world.device)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
        directory = Path(name)
        ways: dict[str, Save] = {
            "torch.save": at_once(
                lambda state, to: torch.save(state, to / "state.pt")
            ),  # not synced
            "dcp.save": at_once(lambda state, to: dcp.save(state, checkpoint_id=to / "dcp")),
            "dcp.async_save": dcp_async_save,
            "rollcall": rollcall_save(world, directory / "rollcall"),
        }

        def timed(way: str, _: int) -> turns.Figures:
            return measure(ways[way], directory / way, training)

        saves = {way: partial(timed, way) for way in ways}
        turns.take_turns(saves, 1)  # the first of each way is slower
        found = turns.take_turns(saves, options.repeats)
        reading = loads(world, directory, training.state)
        loading = {way: partial(_seconds, load) for way, load in reading.items()}
        turns.take_turns(loading, 1)  # now the files are in the page cache
        read = turns.take_turns(loading, options.repeats)
    world.leave()
    rows = [("", "stall", "relative to torch.save", "on disk after", "step rate during the save")]
    for way, each in found.items():
        own = {key: turns.column(each, key) for key in each[0]}
        by = turns.ratios(own["stall"], turns.column(found["torch.save"], "stall"))
        beside = turns.cell(own["rate"]) if any(own["rate"]) else "none"
        times = [turns.cell(own[key], duration) for key in ("stall", "whole")]
        rows.append((way, times[0], turns.cell(by), times[1], beside))
    size = f"{sum(each.nbytes for each in training.tensors) / 1e6:.0f} MB on {world.device.type}"
    turns.show(f"{size}, medians of {options.repeats} saves", rows)
    print()
    turns.compare("all files in the page cache", read, "torch.load")
    return 0
