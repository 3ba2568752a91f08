"""Tensor ranks compile each kind of block once, as one graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollcall.config import parse
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import Place, World

WORDS = [
    *("data.name=synthetic_tokens", "data.seq_len=16", "data.num_classes=64"),
    *("data.global_batch=4", "model.hidden_size=32", "model.num_layers=10"),
    *("parallel.strategy=tensor", "train.compile=true"),
]


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_blocks_are_compiled_once_and_do_not_break(name: str, sequence: bool) -> None:
    words = [*WORDS, f"model.name={name}", f"parallel.sequence_parallel={sequence}".lower()]
    config = parse(words)[1]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = World(Place("plan", world_size=2, local_world_size=2), torch.device("cpu"))
        source = sets.load(config.data, world)
        batch = next(validation_batches(source, 2, 0, 1))
        strategy = Strategy(config, world, losses.Objective(losses.of(config)))
        strategy.place(models.build(config.model, source), batch)
        torch._dynamo.reset()
        counters.clear()
        backend = CompileCounter()
        models.compile_blocks(strategy.model, backend=backend)  # type: ignore[arg-type]
        for _ in range(3):
            strategy.forward_backward([batch], 2)
        # One for the first block, whose input is another kind of tensor, and one for the rest.
        assert (backend.frame_count <= 2, counters["graph_break"]) == (True, {})
        torch._dynamo.reset()
        models.compile_blocks(strategy.model, backend="aot_eager")  # which also has gradients
        strategy.forward_backward([batch], 2)
        assert all(weight.grad is not None for weight in strategy.model.parameters())
    finally:
        dist.destroy_process_group()
