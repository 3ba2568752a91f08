"""In which order are the samples seen? A function of seed, epoch and position alone.

Position counts the samples of the whole run: step s of global batch B covers [s·B, (s+1)·B). So
neither the world size, nor workers, nor a restart changes the order, and resuming needs one
integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from train.data.loading import Loading
from train.data.permutation import Permutation
from train.data.reading import Pick
from train.data.source import Batch, Source
from train.schema import Config


class Order:
    """The training samples of a run in the order in which they are seen.

    Every epoch is a new permutation of all samples. Batches run on over the end of an epoch, so
    only the last batch of the run can be short.
    """

    def __init__(self, size: int, total: int, global_batch: int, seed: int) -> None:
        """Order `total` samples of a set of `size`: as many epochs as that takes."""
        self.size = size
        self.total = total
        self.global_batch = global_batch
        self.steps = math.ceil(self.total / global_batch)
        self.seed = seed

    @classmethod
    def of_run(cls, config: Config, size: int) -> Order:
        """All samples of a run that trains on a set of `size`, by steps or by epochs."""
        batch, steps = config.data.global_batch, config.train.steps
        total = (steps or 0) * batch or round(config.train.epochs * size)
        return cls(size, total, batch, config.seed)

    def count(self, step: int) -> int:
        """Samples of this step over all ranks."""
        return min(self.global_batch, self.total - step * self.global_batch)

    def samples(self, step: int, rows: range) -> tuple[list[int], list[int]]:
        """The samples in these rows of the step's global batch, and the epoch of each.

        Args:
            step: from 0.
            rows: places in the global batch; those at or after `count(step)` are padding, for
                which the last sample is repeated.
        """
        places = step * self.global_batch + np.minimum(rows, self.count(step) - 1)
        epochs, places = np.divmod(places, self.size)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = Permutation(self.size, self.seed, "order", int(epoch))(places[here])
        return samples.tolist(), epochs.tolist()


def training_batches(
    source: Source, order: Order, rows: range, steps: range, loading: Loading | None = None
) -> Iterator[Batch]:
    """This rank's rows of each step's global batch, padding weighted zero.

    Args:
        rows: this rank's places in the global batch, as many at every step.
        steps: from the first step to do to the end of the run.
        loading: how they are read (default: in this process).
    """

    def pick(step: int) -> Pick:
        return Pick(*order.samples(step, rows), _weights(rows, order.count(step)))

    loading = loading or Loading(seed=order.seed)
    return loading.batches(source.train, "the training data", pick, steps)


def validation_batches(
    source: Source, size: int, rank: int, world_size: int, loading: Loading | None = None
) -> Iterator[Batch]:
    """This rank's share of the validation samples, every sample once over all ranks.

    Every rank gets equally many batches of equally many rows, some of them padding.

    Args:
        size: rows of one batch.
        loading: how they are read (default: in this process).
    """
    count = source.validation_size
    share = math.ceil(count / world_size)

    def pick(number: int) -> Pick:
        first = rank * share + number * size
        rows = range(first, min(first + size, (rank + 1) * share))
        samples = [min(row, count - 1) for row in rows]
        return Pick(samples, [0] * len(rows), _weights(rows, count))

    numbers = range(math.ceil(share / size))
    return (loading or Loading()).batches(source.validation, "the validation data", pick, numbers)


def _weights(rows: range, count: int) -> torch.Tensor:
    return (torch.tensor(rows) < count).float()
