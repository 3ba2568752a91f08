"""Load the model of a run from its newest checkpoint, spread over the ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall import config as schema
from rollcall.config import Config, ConfigError
from rollcall.run_dir import RunDir, named
from rollcall.text import did_you_mean

if TYPE_CHECKING:
    import torch

    from rollcall.train.data.source import Batch, Source
    from rollcall.train.dist.world import World
    from rollcall.train.parallel.strategy import Strategy


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
        found = self.strategy.forward(batch)
        if not hasattr(found, "ndim"):
            raise ConfigError(
                f"model.name={self.config.model.name}: expected one tensor of outputs, got a "
                f"{type(found).__name__}"
            )
        return found  # type: ignore[no-any-return]


def find(run: str, words: Sequence[str]) -> tuple[RunDir, Config]:
    """Return a run and its configuration with these overrides; ConfigError if they are wrong."""
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"expected an option or key=value, got '{word}'; see --help")
    place = named(run, "config.yaml")
    if place is None:
        near = did_you_mean(run, (path.name for path in Path("runs").glob("*")))
        raise ConfigError(
            f"unknown run '{run}': neither {Path(run).absolute()} nor "
            f"{Path('runs', run).absolute()} has a config.yaml{near}"
        )
    place = place.absolute()
    _, config = schema.parse([str(place / "config.yaml"), *words])
    # Exact mode only matters for training, and would limit the number of ranks.
    return RunDir(place.parent, place.name), config.model_copy(update={"exact": False})


@contextmanager
def load(
    run_dir: RunDir,
    config: Config,
    world: "World",
    with_data: bool = True,
    best: bool = False,  # the checkpoint with the best validation instead of the newest
) -> "Iterator[Trained]":
    """Load a checkpoint of a run, the newest by default, with the weights that its evaluation uses.

    Without data, what the run has recorded about its data set is used, if that is enough to read
    files.

    Raises:
        ConfigError: the run has no checkpoint, or it does not fit the configuration.
    """
    from torch.distributed.checkpoint import state_dict

    from rollcall.train import models
    from rollcall.train.checkpoint import cadence, manifest
    from rollcall.train.checkpoint.contents import Damaged
    from rollcall.train.checkpoint.engine import Engine
    from rollcall.train.checkpoint.store import Store
    from rollcall.train.data import sets
    from rollcall.train.data.order import Order, training_batches
    from rollcall.train.numerics import losses, precision
    from rollcall.train.numerics.ema import Ema
    from rollcall.train.parallel.strategy import OPTIONS, Strategy
    from rollcall.train.update import drop_frozen
    from rollcall.train.weights import start

    checkpoints = Engine(Store(run_dir.checkpoints, world))
    if checkpoints.store.newest() is None:
        raise ConfigError(f"{run_dir.path} has no checkpoint yet; train it first")
    precision.prepare(config.precision, world.device)
    strategy = Strategy(config, world, losses.Objective(losses.of(config)))
    source = None if with_data else _recorded(run_dir, config, world)
    source = source or sets.load(config.data, world, config.seed)
    begin = start.built(config, models.maker(config, source, world.device), draws=False)
    if not config.checkpoint.save_frozen:
        start.read_init(begin, config, world)
    order = Order.of_run(config, source)
    example = next(training_batches(source, order, range(2), range(1)))
    strategy.place(begin.model, example, begin.fill)
    weights = state_dict.get_model_state_dict(strategy.model, options=OPTIONS)
    state: dict[str, Any] = {"model": weights}
    averages = None
    if config.optim.ema and config.optim.evaluate_ema:
        averages = Ema(strategy.model, config.optim.ema)
        state["ema"] = averages.state()
    # Asked late: a running training may remove older ones, but never the newest.
    step = checkpoints.store.newest()
    if best:
        problem = ""
        if world.is_main:
            try:
                step = manifest.read_named(cadence.best(run_dir.checkpoints)).step
            except (ConfigError, Damaged) as error:
                problem = str(error)
        world.raise_together(problem)
        step = world.broadcast(step)
    assert step is not None, "the newest checkpoint is never removed"
    if not config.checkpoint.save_frozen:
        drop_frozen(strategy.model, state)
    checkpoints.load(step, state)
    weights |= state["model"]
    state_dict.set_model_state_dict(strategy.model, weights, options=OPTIONS)
    with averages.in_place() if averages else nullcontext():
        yield Trained(config, step, source, strategy)


def _recorded(run_dir: RunDir, config: Config, world: "World") -> "Source | None":
    """Return the source of the run without its samples, if it can read files."""
    from rollcall.train.data import sets

    facts = run_dir.read_events("data")[-1:] if world.is_main else []
    facts = world.broadcast(facts)
    return sets.without_samples(config.data, facts[0]) if facts else None
