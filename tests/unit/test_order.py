from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from train.data.order import Order, training_batches, validation_batches
from train.data.source import InMemory, Source


def source(train_size: int, validation_size: int) -> Source:
    def samples(size: int) -> InMemory:
        return InMemory(torch.arange(size).float().unsqueeze(1), torch.arange(size))

    return Source(
        samples(train_size), samples(validation_size), train_size, validation_size, (1,), 9
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 5])
def test_each_sample_once_per_epoch_in_the_same_order_at_any_world_size(
    world_size: int, start: int
) -> None:
    order = Order(size=23, total=46, global_batch=7, seed=1)
    alone = [order.samples(step, range(order.count(step))) for step in range(order.steps)]
    assert Counter(itertools.chain(*alone)) == Counter(dict.fromkeys(range(23), 2))
    assert list(itertools.chain(*alone))[:23] != list(itertools.chain(*alone))[23:]

    share = -(-7 // world_size)
    seen: list[list[int]] = [[] for _ in range(start, order.steps)]
    for rank in range(world_size):
        rows = range(rank * share, (rank + 1) * share)
        batches = training_batches(source(23, 1), order, rows, range(start, order.steps))
        for number, batch in enumerate(batches):
            assert len(batch.weights) == share
            seen[number] += batch.targets[batch.weights == 1].tolist()
    assert seen == alone[start:]


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 10, 11])
def test_validation_counts_each_sample_once(world_size: int, size: int) -> None:
    counts: Counter[int] = Counter()
    lengths = set()
    for rank in range(world_size):
        batches = list(validation_batches(source(1, size), 4, rank, world_size))
        lengths.add(len(batches))
        for batch in batches:
            counts.update(batch.targets[batch.weights == 1].tolist())
    assert counts == Counter(range(size))
    assert len(lengths) == 1  # collectives inside the model would hang otherwise
