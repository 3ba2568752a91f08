"""Load the model of a run from its newest checkpoint, spread over the ranks."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall import config as schema
from rollcall.config import Config, ConfigError
from rollcall.messages.text import did_you_mean
from rollcall.records.job import JobRecord
from rollcall.records.run_dir import RunDir, named
from rollcall.train.checkpoint import layout

if TYPE_CHECKING:
    import torch

    from rollcall.train.data.source import Batch, Source
    from rollcall.train.parallel.strategy import Strategy
    from rollcall.train.ranks.world import World

BEST = "use the checkpoint with the best validation, not the newest"


@dataclass(frozen=True)
class Trained:
    """The trained model of a run."""

    config: Config  # of the run, with the user's overrides
    step: int  # of the checkpoint
    source: "Source"
    strategy: "Strategy"

    def outputs(self, batch: "Batch") -> "torch.Tensor":
        """Return the outputs for a batch of this rank; ConfigError if they are not one tensor."""
        outputs = self.strategy.forward(batch)
        if not hasattr(outputs, "ndim"):
            expected = f"expected one tensor of outputs, got a {type(outputs).__name__}"
            raise ConfigError(f"model.name={self.config.model.name}: {expected}")
        return outputs  # type: ignore[no-any-return]


def find(run: str, words: Sequence[str]) -> tuple[RunDir, Config]:
    """Return a run and its configuration with these overrides; ConfigError if one is wrong."""
    path = named(run, "config.yaml")
    if path is None and (other := named(run, "job")):
        record = JobRecord.read(other)
        is_training = record is not None and record.is_training
        what = "has not begun to train" if is_training else "is the run of a script"
        raise ConfigError(f"{other} {what}; expected a run that has trained (rollcall status)")
    if path is None:
        near = did_you_mean(run, (path.parent.name for path in Path("runs").glob("*/config.yaml")))
        raise ConfigError(
            f"unknown run '{run}': neither {Path(run).absolute()} nor "
            f"{Path('runs', run).absolute()} has a config.yaml, as a run of a training has"
            f"{near or '; `rollcall status` lists all runs'}"
        )
    path = path.absolute()
    run_dir = RunDir(path.parent, path.name)
    if not layout.published(run_dir.checkpoints):
        raise ConfigError(f"{path} has no checkpoint yet; train it first")
    _, config = schema.parse([str(path / "config.yaml"), *words])
    # Exact mode only matters for training, and would limit the number of ranks.
    return run_dir, config.model_copy(update={"exact": False})


@contextmanager
def load(
    run_dir: RunDir, config: Config, world: "World", with_data: bool = True, best: bool = False
) -> "Iterator[Trained]":
    """Load the newest or best checkpoint of a run, with the weights that its evaluation uses.

    Without `with_data`, the run's record of its data set is used if that is enough to read files.
    """
    from torch.distributed.checkpoint import state_dict

    from rollcall.train import models
    from rollcall.train.checkpoint import scores
    from rollcall.train.checkpoint.engine import Engine
    from rollcall.train.checkpoint.store import CheckpointStore
    from rollcall.train.data import sets
    from rollcall.train.data.order import Order, training_batches
    from rollcall.train.numerics import losses, precision
    from rollcall.train.numerics.ema import Ema
    from rollcall.train.numerics.optim import OPTIONS
    from rollcall.train.parallel.strategy import Strategy
    from rollcall.train.state import drop_frozen
    from rollcall.train.weights import start

    checkpoints = Engine(CheckpointStore(run_dir.checkpoints, world))
    precision.prepare(config.precision, world.device)
    try:
        strategy = Strategy(config, world, losses.Objective(losses.of(config)))
    except ConfigError as error:
        if config.parallel.mesh is None:
            raise
        if world.is_main:
            print(f"rollcall: each rank holds the whole model, because {error}", file=sys.stderr)
        whole = config.parallel.model_copy(update={"strategy": "ddp", "mesh": None})
        config = config.model_copy(update={"parallel": whole})
        strategy = Strategy(config, world, losses.Objective(losses.of(config)))
    source = None
    if not with_data:  # the run's record of its data may be enough to read files
        facts = world.broadcast(run_dir.read_events("data")[-1:] if world.is_main else [])
        source = sets.without_samples(config.data, facts[0]) if facts else None
    source = source or sets.load(config.data, world, config.seed)
    begin = start.built(config, models.maker(config, source, world.device))
    if not config.checkpoint.save_frozen:
        start.read_init(begin, config, world)
    batches = training_batches(source, Order.of_run(config, source), range(2), range(1))
    fill = partial(begin.fill, draws=not config.checkpoint.save_frozen)
    strategy.place(begin.model, next(batches), fill)
    weights = state_dict.get_model_state_dict(strategy.model, options=OPTIONS)
    state: dict[str, Any] = {"model": weights}
    if module := strategy.loss.module:  # it is filled in place
        state["loss"] = module.state_dict()
    averages = None
    if config.optim.ema and config.optim.evaluate_ema:
        averages = Ema(strategy.model, config.optim.ema)
        state["ema"] = averages.state()
    # Read late: a running training may remove older checkpoints, but never the newest.
    step = checkpoints.store.newest()
    if best:
        with world.together():
            step = scores.best(run_dir.checkpoints) if world.is_main else None
        step = world.broadcast(step)
    assert step is not None, "the newest checkpoint is never removed"
    if not config.checkpoint.save_frozen:
        drop_frozen(strategy.model, state)
    checkpoints.load(step, state)
    weights |= state["model"]
    state_dict.set_model_state_dict(strategy.model, weights, options=OPTIONS)
    with averages.in_place() if averages else nullcontext():
        yield Trained(config, step, source, strategy)
