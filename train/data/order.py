"""The order of the samples: a function of seed, epoch and position alone.

The position counts the samples of the whole run: step s of a global batch B covers [s·B, (s+1)·B).
So neither the world size, nor workers, nor a restart changes the order, and a resume needs only the
step. A run that is resumed with another global batch or seed continues at the same position.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollcall.config.schema import Config, ConfigError
from rollcall.train.data.loading import Loading
from rollcall.train.data.permutation import Permutation
from rollcall.train.data.reader import Selection
from rollcall.train.data.source import Batch, Source
from rollcall.train.data.stream import Stream

PLANNED = 4096
"""Samples that are chosen at once; to choose 64 in each of 64 calls takes ten times as long."""
TABLE = 1 << 16
"""Samples of an epoch whose order is computed at once: for so few, calls cost more than numbers."""


class Order:
    """The training samples of a run, in the order of training.

    Every epoch is a new permutation of all samples. A batch may span two epochs, so only the last
    batch of the run can be incomplete.
    """

    def __init__(self, size: int, total: int, global_batch: int, seed: int) -> None:
        """Order `total` samples of a data set of `size` samples; they may span several epochs."""
        self.size = size
        self.total = total
        self.global_batch = global_batch
        self.steps = math.ceil(total / global_batch)
        self.seed = seed
        self._is_by_steps = False  # whether train.steps is given
        self._parts = 0  # of a stream, whose samples are read by their positions
        self._base = 0, 0  # a step, and its position
        self._running = -1, seed  # the epoch at that position, and its seed

    @classmethod
    def of_run(cls, config: Config, source: Source) -> "Order":
        """Return the order of a run on a data set, for its steps or epochs.

        Raises:
            ConfigError: a stream has no length, and train.steps is not set.
        """
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
        """Return how many samples were seen before a step, and the seed of the running epoch."""
        samples = self.position(step)
        return {"samples": samples, "order_seed": self._seed_of(samples // self.size)}

    def continue_from(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue at a step with these `facts`, which another global batch or seed may have.

        An epoch that was begun keeps its seed, so that each of its samples is seen once.
        """
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
        """Return how many samples are seen before this step."""
        first, samples = self._base
        return min(samples + (step - first) * self.global_batch, max(samples, self.total))

    def count(self, step: int) -> int:
        """Return the number of samples of this step, over all ranks."""
        return min(self.global_batch, self.total - self.position(step))

    def count_of(self, step: int, rows: range) -> int:
        """Return how many of these rows of the step's global batch are samples, not padding."""
        return max(0, min(rows.stop, self.count(step)) - rows.start)

    def samples(self, step: int, rows: range) -> tuple[list[int], list[int]]:
        """Return the sample in each of these rows of the step's global batch, and its epoch.

        Steps count from 0. Rows from `count(step)` on are padding. They repeat the samples of the
        step in turn, so that BatchNorm sees each about equally often; those of a stream the last.
        """
        return self.plan(range(step, step + 1), rows)[0]

    def plan(self, steps: range, rows: range) -> list[tuple[list[int], list[int]]]:
        """Return the same for several steps; for small batches that is quicker than one by one."""
        starts = np.array([[self.position(step)] for step in steps])
        counts = np.array([[self.count(step)] for step in steps])
        every = np.array(rows, dtype=np.int64)
        if self._parts:
            # Rows of one part are neighbors, so that a rank reads few parts.
            found = []
            places = np.minimum(every, counts - 1)  # a stream is not read backwards
            for start, count, line in zip(starts[:, 0], counts[:, 0], places, strict=True):
                whole = np.arange(start, start + count)
                own = whole[np.argsort(whole % self._parts, kind="stable")[line]]
                found.append((own.tolist(), [0] * len(rows)))
            return found
        positions = starts + every % counts
        epochs, positions = np.divmod(positions, self.size)
        samples = np.empty_like(positions)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            here = epochs == epoch
            samples[here] = _shuffle(self.size, self._seed_of(epoch), epoch)(positions[here])
        return list(zip(samples.tolist(), epochs.tolist(), strict=True))

    def _seed_of(self, epoch: int) -> int:
        running, seed = self._running
        return seed if epoch == running else self.seed


def training_batches(
    source: Source, order: "Order", rows: range, steps: range, loading: Loading | None = None
) -> Iterator[Batch]:
    """Yield this rank's rows of each step's global batch; padding has weight zero."""

    at_once = max(1, PLANNED // max(1, len(rows)))
    whole = torch.ones(len(rows))

    @lru_cache(maxsize=1)
    def planned(block: int) -> list[tuple[list[int], list[int]]]:
        return order.plan(range(block * at_once, min((block + 1) * at_once, steps.stop)), rows)

    def select(step: int) -> Selection:
        count = order.count(step)
        samples = planned(step // at_once)[step % at_once]
        return Selection(*samples, whole if rows.stop <= count else _weights(rows, count))

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
    """Yield this rank's share of the validation samples, every sample once over all ranks.

    All ranks get the same number of batches of `size` rows, of which some are padding.
    """
    samples, count = source.validations[name]
    share = math.ceil(count / world_size)

    def select(batch: int) -> Selection:
        first = rank * share + batch * size
        rows = range(first, min(first + size, (rank + 1) * share))
        indices = [min(row, count - 1) for row in rows]
        return Selection(indices, [0] * len(rows), _weights(rows, count))

    batches = range(math.ceil(share / size))
    loading = loading or Loading()
    what = f"the validation data{f' {name}' * bool(name)}"
    return loading.batches(samples, what, select, batches, source.form)


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle(size: int, seed: int, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function from positions in an epoch to samples; a small epoch is a table."""
    permutation = Permutation(size, seed, "order", epoch)
    if size > TABLE:
        return permutation
    table = permutation(np.arange(size))
    return lambda positions: table[positions]


def _weights(rows: range, count: int) -> torch.Tensor:
    return (torch.tensor(rows) < count).float()
