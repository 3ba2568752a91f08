"""The order of the samples: a function of seed, epoch and position alone.

The position counts the samples of the whole run: step s of a global batch B covers [s·B, (s+1)·B).
So neither the world size, nor workers, nor a restart changes the order, and a resume needs only the
step. A run that is resumed with another global batch or seed continues at the same position.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollcall.config.schema import Config, ConfigError
from rollcall.train.data.loading import Loading
from rollcall.train.data.reader import Selection
from rollcall.train.data.source import Batch, Source
from rollcall.train.data.stream import Stream
from rollcall.train.numerics.randomness import derive

PLANNED = 4096
"""Samples that are chosen at once; 64 calls for 64 samples each would take ten times as long."""
ROUNDS = 8  # with 6, permutations of 4 and 5 samples are measurably uneven; with 8, none are


class Order:
    """The samples of a run: each epoch is a new permutation, and a batch may span two epochs."""

    def __init__(self, size: int, total: int, global_batch: int, seed: int) -> None:
        """Order `total` samples of a data set of `size` samples; they may span several epochs."""
        self.size, self.total, self.seed = size, total, seed
        self.global_batch, self.steps = global_batch, math.ceil(total / global_batch)
        self._is_by_steps = False  # train.steps is given, not train.epochs
        self._parts = 0  # of a stream, whose samples are read by their positions
        self._base = 0, 0  # a step, and its position
        self._running = -1, seed  # the epoch at that position, and its seed

    @classmethod
    def of_run(cls, config: Config, source: Source) -> "Order":
        """Return the order of a run on a data set; ConfigError for a stream without train.steps."""
        batch, steps, size = config.data.global_batch, config.train.steps, source.train_size
        if size < 0 and steps is None:
            raise ConfigError(
                f"data.name={config.data.name} is a stream of unknown length: set train.steps"
            )
        total = (steps or 0) * batch or round(config.train.epochs * size)
        if not total and size > 0:
            raise ConfigError(
                f"train.epochs={config.train.epochs} of {size} samples is less than one sample; "
                "raise it, or set train.steps"
            )
        order = cls(total if size < 0 else size, total, batch, config.seed)
        order._is_by_steps = steps is not None
        order._parts = source.train.parts if isinstance(source.train, Stream) else 0
        return order

    def facts(self, step: int) -> dict[str, Any]:
        """Return the number of samples seen before a step, and the seed of the running epoch."""
        samples = self.position(step)
        return {"samples": samples, "order_seed": self._seed_of(samples // self.size)}

    def continue_from(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue a run with its `facts` at a step; an epoch that has begun keeps its seed."""
        samples = facts.get("samples", step * self.global_batch)
        self._base = step, samples
        self._running = -1, self.seed
        if samples % self.size:
            self._running = samples // self.size, facts.get("order_seed", self.seed)
        if self._is_by_steps:
            self.total = samples + (self.steps - step) * self.global_batch
        else:
            self.steps = step + max(0, math.ceil((self.total - samples) / self.global_batch))

    def position(self, step: int) -> int:
        """Return the number of samples seen before this step."""
        first, samples = self._base
        return min(samples + (step - first) * self.global_batch, max(samples, self.total))

    def count(self, step: int) -> int:
        """Return the number of samples of this step, over all ranks."""
        return min(self.global_batch, self.total - self.position(step))

    def samples(self, step: int, rows: range) -> tuple[list[int], list[int]]:
        """Return the sample in each of these rows of the step's global batch, and its epoch.

        Steps count from 0. Rows from `count(step)` on are padding. They repeat the samples of the
        step in turn, so that BatchNorm sees each about equally often; in a stream, the last sample.
        """
        return self.plan(range(step, step + 1), rows)[0]

    def plan(self, steps: range, rows: range) -> list[tuple[list[int], list[int]]]:
        """Return `samples` for each of several steps, which is faster for small batches."""
        starts = np.array([[self.position(step)] for step in steps])
        counts = np.array([[self.count(step)] for step in steps])
        columns = np.array(rows, dtype=np.int64)
        if self._parts:
            # Rows of one part are neighbors, so that a rank reads few parts.
            plans = []
            sample_rows = np.minimum(columns, counts - 1)  # a stream is not read backwards
            for start, count, line in zip(starts[:, 0], counts[:, 0], sample_rows, strict=True):
                positions = np.arange(start, start + count)
                by_part = np.argsort(positions % self._parts, kind="stable")
                plans.append((positions[by_part[line]].tolist(), [0] * len(rows)))
            return plans
        epochs, positions = np.divmod(starts + columns % counts, self.size)
        samples = np.empty_like(positions)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            in_epoch = epochs == epoch
            shuffle = Permutation(self.size, self._seed_of(epoch), "order", epoch)
            samples[in_epoch] = shuffle(positions[in_epoch])
        return list(zip(samples.tolist(), epochs.tolist(), strict=True))

    def _seed_of(self, epoch: int) -> int:
        running, seed = self._running
        return seed if epoch == running else self.seed


def training_batches(
    source: Source, order: Order, rows: range, steps: range, loading: Loading | None = None
) -> Iterator[Batch]:
    """Yield this rank's rows of each step's global batch; padding has weight zero."""
    block_size = max(1, PLANNED // max(1, len(rows)))  # in steps
    ones = torch.ones(len(rows))

    @lru_cache(maxsize=1)
    def planned(block: int) -> list[tuple[list[int], list[int]]]:
        first = block * block_size
        return order.plan(range(first, min(first + block_size, steps.stop)), rows)

    def select(step: int) -> Selection:
        count = order.count(step)
        samples = planned(step // block_size)[step % block_size]
        return Selection(*samples, ones if rows.stop <= count else _weights(rows, count))

    loading = loading or Loading(seed=order.seed)
    return loading.batches(source.train, "the training data", select, steps, source.form)


def validation_batches(
    source: Source,
    size: int,
    rank: int,
    world_size: int,
    loading: Loading | None = None,
    name: str = "",  # of the validation set
) -> Iterator[Batch]:
    """Yield this rank's share of the samples, each once; all ranks get as many batches."""
    samples, count = source.validations[name]
    share = math.ceil(count / world_size)

    def select(batch: int) -> Selection:
        first = rank * share + batch * size
        rows = range(first, min(first + size, (rank + 1) * share))
        indices = [min(row, count - 1) for row in rows]
        return Selection(indices, [0] * len(rows), _weights(rows, count))

    batches = range(math.ceil(share / size))
    title = f"the validation data {name}".rstrip()
    return (loading or Loading()).batches(samples, title, select, batches, source.form)


def _weights(rows: range, count: int) -> torch.Tensor:
    return (torch.tensor(rows) < count).float()


class Permutation:
    """A permutation of 0 … size - 1 that depends only on a seed, in constant memory.

    A Feistel network mixes the two digits of a number, and mixes a result outside the range again
    until it is inside. Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    def __init__(self, size: int, seed: int, *purpose: str | int) -> None:
        """Permute `size` numbers, at least 1 and below 2^60, for a purpose as in `derive`."""
        self.size = size
        self._side = np.uint64(math.isqrt(size - 1) + 1)
        self._keys = [np.uint64(derive(seed, *purpose, number)) for number in range(ROUNDS)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions (n,) to the numbers at them (n,)."""
        numbers = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self.size)
        while len(outside):
            numbers[outside] = self._mix(numbers[outside])
            outside = outside[numbers[outside] >= self.size]
        return numbers.astype(np.int64)

    def _mix(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, self._side)
        for key in self._keys:
            # The hash loses one bit, so that the sum does not overflow.
            left, right = right, (left + (_hash(right + key) >> np.uint64(1))) % self._side
        mixed: NDArray[np.uint64] = left * self._side + right
        return mixed


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
