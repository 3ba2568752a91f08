"""In which order are the samples seen? A function of seed, epoch and position alone.

Position counts the samples of the whole run: step s of global batch B covers [s·B, (s+1)·B). So
neither the world size, nor workers, nor a restart changes the order, and resuming needs one
integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from train.data.source import Batch, Source
from train.randomness import derive


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
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def count(self, step: int) -> int:
        """Samples of this step over all ranks."""
        return min(self.global_batch, self.total - step * self.global_batch)

    def samples(self, step: int, rows: range) -> list[int]:
        """The samples in these rows of the step's global batch, the last one repeated as padding.

        Args:
            step: from 0.
            rows: places in the global batch; those at or after `count(step)` are padding.
        """
        start, last = step * self.global_batch, self.count(step) - 1
        return [self._sample(start + min(row, last)) for row in rows]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self.size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive(self._seed, "order", epoch))
            self._permutation = torch.randperm(self.size, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[index]


class _Steps(Sampler[list[int]]):
    def __init__(self, order: Order, rows: range, steps: range) -> None:
        self._order, self._rows, self._steps = order, rows, steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            yield self._order.samples(step, self._rows)


def training_batches(source: Source, order: Order, rows: range, steps: range) -> Iterator[Batch]:
    """This rank's rows of each step's global batch, padding weighted zero.

    Args:
        rows: this rank's places in the global batch, as many at every step.
        steps: from the first step to do to the end of the run.
    """
    loader = DataLoader(
        source.train, batch_sampler=_Steps(order, rows, steps), collate_fn=_as_fetched
    )
    for step, batch in zip(steps, loader, strict=True):
        yield batch._replace(weights=_weights(rows, order.count(step)))


def validation_batches(source: Source, size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's share of the validation samples, every sample once over all ranks.

    Every rank gets equally many batches of equally many rows, some of them padding.

    Args:
        size: rows of one batch.
    """
    share = math.ceil(source.validation_size / world_size)
    first = rank * share
    batches = [
        range(start, min(start + size, first + share))
        for start in range(first, first + share, size)
    ]
    last = source.validation_size - 1
    sampler = [[min(row, last) for row in rows] for rows in batches]
    loader = DataLoader(source.validation, batch_sampler=sampler, collate_fn=_as_fetched)
    for rows, batch in zip(batches, loader, strict=True):
        yield batch._replace(weights=_weights(rows, source.validation_size))


def _weights(rows: range, count: int) -> torch.Tensor:
    return (torch.tensor(rows) < count).float()


def _as_fetched(batch: Any) -> Any:
    return batch
