"""`python -m train plan --ranks 512 …`: what a run would do on so many ranks, on this machine.

Rank 0 of a world that is not there: the model is built and spread as in the run, torch's fake
process group stands for the others, and nothing is computed, written or sent.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Internal to torch (2.11 to 2.15), and what its own tests of such worlds use.
from torch.testing._internal.distributed.fake_pg import FakeStore

from train import data, losses, models, parallel
from train.config import Config, ConfigError, parse
from train.data.order import Order, training_batches
from train.randomness import set_seed
from train.world import Place, World


def main(words: Sequence[str]) -> int:
    """Print the plan; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train plan", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the world")
    parser.add_argument("--node-size", type=int, metavar="K", help="ranks of a node (all)")
    parser.add_argument("words", nargs="*", metavar="[recipe] [key=value ...]")
    options = parser.parse_intermixed_args(words)
    node_size = options.node_size or options.ranks
    if options.ranks < 1 or options.ranks % node_size:
        print(
            f"plan: error: --ranks {options.ranks} are not whole nodes of {node_size} ranks",
            file=sys.stderr,
        )
        return 2
    try:
        recipe, config = parse(options.words)
        print(f"{recipe}: {_plan(config, options.ranks, node_size)}")
    except ConfigError as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(config: Config, ranks: int, node_size: int) -> str:
    """The plan in words.

    Raises:
        ConfigError: what the run itself would be refused with.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        place = Place("plan", world_size=ranks, local_world_size=node_size)
        world = World(place, torch.device("cpu"))
        strategy = parallel.build(config, world, losses.Objective(losses.build(config.train.loss)))
        source = data.load(config.data, world)
        batch = config.data.global_batch
        order = Order.of_run(config, source.train_size)
        set_seed(config.seed, "model")
        model = models.adapt(models.build(config.model, source), config, world.device)
        count = sum(parameter.numel() for parameter in model.parameters())
        example = next(training_batches(source, order, range(2), range(order.steps)))
        strategy.place(model, example)
        rows = len(strategy.rows(batch))
        cuts = math.ceil(rows / (config.data.micro_batch or rows))
        epochs = order.total / source.train_size
        return (
            f"{order.steps:,} steps of {batch:,} samples, {epochs:.3g} epochs of "
            f"{source.train_size:,}; {count:,} parameters; {rows:,} samples a step on each rank, "
            f"in {cuts} micro-batch{'es' * (cuts > 1)}.\n{strategy.describe()}"
        )
    finally:
        dist.destroy_process_group()
