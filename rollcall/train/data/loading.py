"""Deliver batches to a rank: workers read ahead, and copies overlap with the GPU's computation."""

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.form import Form
from rollcall.train.data.reader import Reader, ReadResult, Selection
from rollcall.train.data.source import Batch
from rollcall.train.data.stream import Stream, StreamPosition
from rollcall.train.data.workers import WorkerDiedError, WorkerError, in_order
from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.agreement import FaultError
from rollcall.train.ranks.clock import DATA, OTHER, clock
from rollcall.train.ranks.device import copy_ahead, hand_over
from rollcall.train.ranks.world import World

READING = doing("reading data")
KEPT_POSITIONS = 8
"""Newest batches of a stream whose positions are kept; a batch or two are read ahead."""


class Loading:
    """Reads the batches of one rank: by default in this process and for the CPU."""

    def __init__(
        self,
        config: Data | None = None,
        seed: int = 0,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._config, self._device = config or Data(), device or torch.device("cpu")
        self._seed, self._rank = seed, rank
        # Samples that this rank could not read in the current epoch, up to the batch that was
        # yielded; infinite after an error that ends reading. The caller sums it over all ranks and
        # calls `refuse`.
        self.unreadable: float = 0
        self._unreadable_ahead: float = 0  # the same, up to the batch that was read
        self.positions: dict[int, StreamPosition] = {}  # in a stream, before each batch
        self._problem = ""
        self._death = ""  # the same, if its workers died
        self._epoch = 0

    def batches(
        self,
        dataset: Dataset[Any],
        name: str,
        select: Callable[[int], Selection],
        numbers: range,
        form: Form | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches with these numbers, in order, on the device.

        Messages call the data set `name`; workers call `select` for the samples of a batch. Raise
        ConfigError or WorkerError if the first batch cannot be read.
        """
        config, form, finish = self._config, form or Form(), None
        if hasattr(dataset, "as_bytes") and form.collate is None and not form.is_whole:
            dataset, finish = dataset.as_bytes()
        reader = Reader(dataset, name, self._seed, form, config.name)

        def fetch(number: int) -> ReadResult:
            return reader.read(select(number))

        self.positions.clear()
        if config.num_workers:
            # Each worker of a stream would read all of it.
            workers = 1 if isinstance(dataset, Stream) else config.num_workers
            is_gpu = self._device.type == "cuda"
            read = in_order(fetch, numbers, workers, config.prefetch_factor, self._rank, is_gpu)
        else:
            read = map(fetch, numbers)
        batches = self._ahead(self._checked(read, numbers))
        return self._timed(map(finish, batches) if finish else batches)

    def refuse(self, world: World, unreadable: float) -> None:
        """Raise ConfigError on all ranks if too much is unreadable; FaultError if workers died."""
        if unreadable > self._config.skip_unreadable + 0.5:  # a rank's share may be a fraction
            if death := world.first_problem(self._death):
                raise FaultError(death)
            world.raise_together(self._problem)

    def _checked(self, read: Iterator[ReadResult], numbers: range) -> Iterator[Batch]:
        batch: Batch | None = None
        count = len(numbers)
        try:
            for batch, problems, position in read:
                for epoch, problem in problems:
                    self._note(epoch, problem)
                if position is not None:
                    number = numbers[-count]
                    self.positions[number + 1] = position
                    self.positions.pop(number - KEPT_POSITIONS, None)
                count -= 1
                yield batch
        except (ConfigError, WorkerError) as error:
            if batch is None:
                raise
            self._unreadable_ahead, self._problem = math.inf, f"rank {self._rank}: {error}"
            self._death = self._problem if isinstance(error, WorkerDiedError) else ""
            # The other ranks wait for this rank in collectives: it continues with weights of zero.
            for _ in range(count):
                yield batch._replace(weights=torch.zeros_like(batch.weights))

    def _note(self, epoch: int, problem: str) -> None:
        if epoch != self._epoch:
            self._epoch, self._unreadable_ahead = epoch, 0
        self._unreadable_ahead += 1
        limit = self._config.skip_unreadable
        self._problem = (
            f"rank {self._rank} cannot read {problem}. Fix the file and resume, or skip up to N "
            f"such samples per epoch with data.skip_unreadable=N (now {limit})"
        )
        if limit:
            print(f"rollcall: rank {self._rank} skips {problem}", file=sys.stderr, flush=True)

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Keep one batch ready; copy it to the GPU on a separate stream, beside the computation."""
        is_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if is_gpu else None  # type: ignore[no-untyped-call]
        ready: tuple[Batch, torch.cuda.Event | None] | None = None
        unreadable = 0.0
        for batch in batches:
            before, ready = ready, copy_ahead(batch, stream) if stream else (batch, None)
            self.unreadable, unreadable = unreadable, self._unreadable_ahead
            if before:
                yield hand_over(*before)
        self.unreadable = unreadable
        if ready:
            yield hand_over(*ready)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            clock.enter(DATA)
            with READING:
                batch = next(batches, None)
            clock.enter(OTHER)
            if batch is None:
                return
            yield batch
