from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from rollcall.config import ConfigError
from rollcall.train.data.loader import Loader
from rollcall.train.data.order import (
    Order,
    Permutation,
    training_batches,
    validation_batches,
)
from rollcall.train.data.source import InMemory, Source
from rollcall.train.data.stream import Stream
from rollcall.train.ranks.world import Place, World


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
    alone = [order.samples(step, range(order.count(step)))[0] for step in range(order.steps)]
    assert Counter(itertools.chain(*alone)) == Counter(dict.fromkeys(range(23), 2))
    assert list(itertools.chain(*alone))[:23] != list(itertools.chain(*alone))[23:]

    share = -(-7 // world_size)
    seen: list[list[int]] = [[] for _ in range(start, order.steps)]
    for rank in range(world_size):
        rows = range(rank * share, (rank + 1) * share)
        batches = training_batches(source(23, 1), order, rows, range(start, order.steps))
        for number, batch in enumerate(batches):
            assert len(batch.weights) == share
            own = [*itertools.islice(itertools.cycle(alone[start + number]), rows.start, rows.stop)]
            assert batch.targets.tolist() == own  # padding repeats the step's samples in turn
            seen[number] += batch.targets[batch.weights == 1].tolist()
    assert seen == alone[start:]


@pytest.mark.parametrize(("batch", "seed"), [(7, 1), (5, 1), (7, 2), (12, 3)])
@pytest.mark.parametrize("step", [0, 2, 4, 10])
def test_each_sample_once_per_epoch_after_a_change_of_batch_and_seed(
    batch: int, seed: int, step: int
) -> None:
    before = Order(size=23, total=69, global_batch=7, seed=1)
    after = Order(size=23, total=69, global_batch=batch, seed=seed)
    after.continue_from(step, before.facts(step))
    # Changed again in the same epoch: the seed with which the epoch began still counts.
    again = Order(size=23, total=69, global_batch=4, seed=9)
    again.continue_from(step + 1, after.facts(step + 1))

    def seen(order: Order, steps: range) -> list[int]:
        return [
            sample
            for number in steps
            for sample in order.samples(number, range(order.count(number)))[0]
        ]

    samples = [
        *seen(before, range(step)),
        *seen(after, range(step, min(step + 1, after.steps))),
        *seen(again, range(step + 1, again.steps)),
    ]
    for epoch in range(3):
        assert sorted(samples[23 * epoch : 23 * (epoch + 1)]) == [*range(23)]
    assert len(samples) == 69


def test_more_epochs_begin_where_the_last_incomplete_batch_ended() -> None:
    order = Order(size=23, total=23, global_batch=7, seed=1)
    longer = Order(size=23, total=46, global_batch=7, seed=1)
    longer.continue_from(order.steps, order.facts(order.steps))
    steps = range(order.steps, longer.steps)
    rest = [one for step in steps for one in longer.samples(step, range(longer.count(step)))[0]]
    assert sorted(rest) == [*range(23)]


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


def test_permutation_of_any_size_that_differs_from_epoch_to_epoch() -> None:
    for size in [*range(1, 70), 255, 256, 257, 1437, 65_537]:
        places = np.arange(size)
        first, second = (Permutation(size, 3, "order", epoch)(places) for epoch in (0, 1))
        assert np.array_equal(np.sort(first), places)
        assert size < 5 or not np.array_equal(first, second)
        # a place is computed by itself, the same in any company
        assert np.array_equal(Permutation(size, 3, "order", 0)(places[::3]), first[::3])


def test_permutations_are_even() -> None:
    # Chi-squared of (size - 1)² degrees of freedom, below its quantile of 1 - 1e-6.
    for size, quantile in ((5, 58.3), (10, 156.4)):
        counts = np.zeros((size, size))
        for epoch in range(1000):
            counts[np.arange(size), Permutation(size, epoch)(np.arange(size))] += 1
        expected = 1000 / size
        assert ((counts - expected) ** 2 / expected).sum() < quantile


def test_a_trillion_samples_need_no_memory() -> None:
    order = Order(size=10**12, total=10**13, global_batch=1000, seed=0)
    tracemalloc.start()
    samples, epochs = order.samples(10**9 - 1, range(1000))  # the end of the first epoch
    following, _ = order.samples(10**9, range(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len({*samples}) == 1000 and min(samples) >= 0 and max(samples) < 10**12
    assert {*epochs} == {0} and not {*samples} & {*following}


class Epochs:
    """A stream of 20 samples, in another order in each epoch; it knows its place in one."""

    epoch = place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.place = epoch, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 20:
            self.place += 1
            yield order[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("stop", [7, 20, 33, 40])
def test_a_stream_continues_from_its_state_in_any_epoch(stop: int) -> None:
    first, second = Stream(Epochs(), "x", 0), Stream(Epochs(), "x", 0)
    whole = [first[position] for position in range(stop)]
    assert second[0] == whole[0]  # as a run looks at the shape of a sample
    second.continue_at(first.position())
    rest = range(stop, 60)
    assert [second[position] for position in rest] == [first[position] for position in rest]


class Shuffled:
    """A stream that shuffles all its samples when it is started."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


def test_a_stream_that_shuffles_has_one_order_on_all_ranks() -> None:
    orders = []
    for _ in range(2):
        stream = Stream(Shuffled(), "x", 0)
        orders.append([stream[position] for position in range(40)])
        torch.rand(3)
    assert orders[0] == orders[1]
    assert orders[0][:20] != orders[0][20:]


class Watched(Order):
    """An order that keeps the steps that were planned last."""

    planned = range(0)

    def plan(self, steps: range, rows: range) -> list[tuple[list[int], list[int]]]:
        self.planned = steps
        return super().plan(steps, rows)


def test_an_example_does_not_order_the_whole_run() -> None:
    samples = InMemory(torch.zeros(50, 1), torch.zeros(50, dtype=torch.int64))
    order = Watched(50, 50 * 100, 25, seed=3)
    batch = next(training_batches(Source(samples, samples), order, range(2), range(1)))
    assert (len(batch.weights), order.planned) == (2, range(1))


@pytest.mark.parametrize(
    ("size", "batch", "word"), [(30, 64, "data set of 30"), (30, 7, "equally")]
)
def test_a_loader_without_a_batch_is_refused(size: int, batch: int, word: str) -> None:
    world = World(Place("torchrun", 0, 0, 2, 2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=word):
        Loader(source(size, 1).train, batch, world, shuffle=True)
    assert len(Loader(source(size, 1).train, 64, world)) == 1  # in an evaluation no batch is full


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
def test_a_loader_continues_in_a_pass(taken: int) -> None:
    """After the batches that it has handed out; a pass that was left does not continue."""
    place = World(Place("torchrun", 0, 0, 2, 2), torch.device("cpu"))
    samples = TensorDataset(torch.arange(33))

    def loader() -> Loader:
        return Loader(samples, 8, place, shuffle=True, seed=1)

    def epochs(mine: Loader, count: int) -> list[list[int]]:
        return [batch.tolist() for _ in range(count) for (batch,) in mine]

    whole = epochs(loader(), 3)
    first, second = loader(), loader()
    assert epochs(first, 1) == whole[:4]
    current = iter(first)
    assert [next(current)[0].tolist() for _ in range(taken)] == whole[4 : 4 + taken]
    second.load_state_dict(first.state_dict())
    assert epochs(second, 2) == whole[4 + taken :]
    del current
    second.load_state_dict(first.state_dict())
    assert epochs(second, 1) == whole[4 if taken == 0 else 8 :][:4]
