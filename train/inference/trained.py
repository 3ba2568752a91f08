"""The model of a run as it was last saved, spread over the ranks, ready to compute."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import config as schema
from train.config import Config, ConfigError
from train.run import RunDir, named, read_lines

if TYPE_CHECKING:
    from train.data.source import Source
    from train.parallel import Strategy
    from train.stop import StopSignals
    from train.world import World


@dataclass(frozen=True)
class Trained:
    """A run's model.

    Attributes:
        config: of the run, with the user's changes.
        step: after which the weights were saved.
        source: the data of the run.
    """

    config: Config
    step: int
    source: Source
    strategy: Strategy


def find(run: str, words: Sequence[str]) -> tuple[RunDir, Config]:
    """The run of this name or path, and its configuration.

    Args:
        run: a directory, or the name of one in runs/.
        words: key=value, which change the configuration.

    Raises:
        ConfigError: there is no such run, or the words are wrong.
    """
    stray = [word for word in words if word.startswith("-") or "=" not in word]
    if stray:
        raise ConfigError(f"'{stray[0]}' is no option and no key=value pair; see --help")
    place = named(run, "config.yaml")
    if place is None:
        raise ConfigError(
            f"there is no run '{run}': neither {Path(run).absolute()} nor "
            f"{Path('runs', run).absolute()} has a config.yaml"
        )
    _, config = schema.parse([str(place.absolute() / "config.yaml"), *words])
    # Exact sums are a matter of training, and would bind the number of ranks.
    return RunDir(place.absolute().parent, place.absolute().name), config.model_copy(
        update={"exact": False}
    )


def on_all_ranks(config: Config, work: Callable[[World, StopSignals], bool]) -> int:
    """Let all ranks meet and work; the exit code is that of `python -m train`.

    Args:
        work: returns whether it came to its end; if not, it was asked to stop.
    """
    from train.stop import StopSignals
    from train.world import World

    with StopSignals() as stop:
        try:
            world = World.join(config.device)
        except ConfigError as error:
            return refuse(error)
        try:
            code = 0 if work(world, stop) else os.EX_TEMPFAIL
        except ConfigError as error:
            code = refuse(error) if world.is_main else 2
        world.leave()
        return code


def add(*numbers: float) -> list[float]:
    """The sums of these numbers over all ranks, which call it together."""
    import torch
    import torch.distributed as dist

    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def refuse(error: ConfigError) -> int:
    """Explain a refusal; return its exit code."""
    for line in str(error).splitlines():
        print(f"rollcall: error: {line}", file=sys.stderr)
    return 2


@contextmanager
def load(
    run_dir: RunDir, config: Config, world: World, with_data: bool = True
) -> Iterator[Trained]:
    """The model with the weights that were last saved, those that evaluation uses.

    Args:
        with_data: also its data set; without it what the run has recorded of the data does, where
            that is enough to read files.

    Raises:
        ConfigError: nothing was saved, or it does not fit the configuration.
    """
    from torch.distributed.checkpoint import state_dict

    from train import data, losses, models, parallel, precision
    from train.checkpoint import Checkpointer
    from train.data.order import Order, training_batches
    from train.ema import Ema
    from train.parallel.strategy import OPTIONS

    checkpoints = Checkpointer(run_dir.checkpoints, world)
    if checkpoints.newest() is None:
        raise ConfigError(f"{run_dir.path} has no checkpoint yet: train it first")
    precision.prepare(config.precision, world.device)
    strategy = parallel.build(config, world, losses.Objective(losses.build(config.train.loss)))
    source = None if with_data else _recorded(run_dir, config, world)
    source = source or data.load(config.data, world)
    model = models.adapt(models.build(config.model, source), config, world.device)
    order = Order(source.train_size, 2, 2, config.seed)
    strategy.place(model, next(training_batches(source, order, range(2), range(1))))
    state: dict[str, Any] = {
        "model": state_dict.get_model_state_dict(strategy.model, options=OPTIONS)
    }
    averages = None
    if config.optim.ema and config.optim.evaluate_ema:
        averages = Ema(strategy.model, config.optim.ema)
        state["ema"] = averages.state()
    step = checkpoints.newest()  # only now: a training removes old ones meanwhile
    assert step is not None, "the newest one is never removed"
    checkpoints.load(step, state)
    state_dict.set_model_state_dict(strategy.model, state["model"], options=OPTIONS)
    with averages.in_place() if averages else nullcontext():
        yield Trained(config, step, source, strategy)


def _recorded(run_dir: RunDir, config: Config, world: World) -> Source | None:
    """The kind of data that the run has learned from, without the data."""
    from train.data.readers import blank

    events = read_lines(run_dir.events) if world.is_main else []
    facts = [line for line in events if line["event"] == "data"][-1:]
    facts = json.loads(world.broadcast_text(json.dumps(facts)))
    return blank(config.data, facts[0]) if facts else None
