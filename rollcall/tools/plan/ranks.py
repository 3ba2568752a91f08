"""Spread a model over imaginary ranks: `rollcall plan --ranks 512 …`.

This process is rank 0 of an imaginary world. It builds and spreads the model as in the run, but
torch's fake process group replaces the other ranks, and nothing is computed, written or sent.
"""

import math

import torch
import torch.distributed as dist

from rollcall.config import Config
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.data.order import Order, training_batches
from rollcall.train.exact.strategy import Exact
from rollcall.train.numerics import losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import Place, World
from rollcall.train.torch_private import fake_store
from rollcall.train.weights import start


def describe(config: Config, ranks: int, node_size: int) -> str:
    """Return the steps, the rows of each rank, and what rank 0 holds and sends."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        rank = Place("plan", world_size=ranks, local_world_size=node_size)
        world = World(rank, torch.device("cpu"))
        kind = Exact if config.exact else Strategy
        strategy = kind(config, world, losses.Objective(losses.of(config)))
        source = sets.load(config.data, world, config.seed)
        batch = config.data.global_batch
        order = Order.of_run(config, source)
        model = start.built(config, models.maker(config, source, world.device)).model
        count = sum(parameter.numel() for parameter in model.parameters())
        example = next(training_batches(source, order, range(2), range(order.steps)))
        strategy.place(model, example)
        rows = len(strategy.rows(batch))
        size = config.data.micro_batch
        cuts = math.ceil(rows / (size if isinstance(size, int) else rows))
        epochs = order.total / source.train_size
        return (
            f"{order.steps:,} steps of {batch:,} samples, {epochs:.3g} epochs of "
            f"{source.train_size:,}; {count:,} parameters; {rows:,} samples a step on each rank, "
            f"in {cuts} micro-batch{'' if cuts == 1 else 'es'}.\n{strategy.describe()}"
        )
    finally:
        dist.destroy_process_group()
