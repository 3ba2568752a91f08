"""How do batches come to a rank in time? Read ahead by workers, copied while the GPU works."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from train.data.reading import Fetched, Pick, Reader
from train.data.source import Batch
from train.data.workers import WorkerError, in_order
from train.schema import ConfigError, Data
from train.world import World


class Loading:
    """Reads the batches of one rank.

    Attributes:
        unreadable: how many samples this rank could not read, in the present epoch; infinite if it
            can read no more. The caller adds them up over all ranks and calls `refuse`.
    """

    def __init__(
        self,
        config: Data | None = None,
        seed: int = 0,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Read as the configuration says; without one, in this process and for the CPU.

        Args:
            seed: of the run, from which each sample's own is derived.
        """
        self._config = config or Data()
        self._seed = seed
        self._rank = rank
        self._device = device or torch.device("cpu")
        self._waited = 0.0
        self.unreadable: float = 0
        self._problem = ""
        self._epoch = 0

    def batches(
        self, dataset: Dataset[Any], name: str, pick: Callable[[int], Pick], numbers: range
    ) -> Iterator[Batch]:
        """The batches of these numbers, in order, on the device.

        Args:
            name: of the data set, for messages.
            pick: which samples make the batch of a number; called in the workers.

        Raises:
            ConfigError, WorkerError: nothing can be read from the first batch on.
        """
        reader = Reader(dataset, name, self._seed)

        def fetch(number: int) -> Fetched:
            return reader.read(pick(number))

        config = self._config
        if config.workers:
            read = in_order(fetch, numbers, config.workers, config.prefetch, self._rank)
        else:
            read = map(fetch, numbers)
        return self._timed(self._ahead(self._checked(read, len(numbers))))

    def take_waited(self) -> float:
        """For how many seconds the caller has waited for batches since it last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def refuse(self, world: World, unreadable: float) -> None:
        """Stop all ranks if too many samples could not be read.

        Args:
            unreadable: over all ranks, the same on each.

        Raises:
            ConfigError: names the rank, the file and the sample, on every rank.
        """
        if unreadable > self._config.skip_unreadable + 0.5:  # shares of ranks do not add up exactly
            world.raise_together(self._problem)

    def _checked(self, read: Iterator[Fetched], count: int) -> Iterator[Batch]:
        batch: Batch | None = None
        try:
            for batch, problems in read:
                for epoch, problem in problems:
                    self._note(epoch, problem)
                count -= 1
                yield batch
        except (ConfigError, WorkerError) as error:
            if batch is None:
                raise
            self.unreadable, self._problem = math.inf, f"rank {self._rank}: {error}"
            # The others compute already, and wait for this rank: it computes nothing with them.
            for _ in range(count):
                yield batch._replace(weights=torch.zeros_like(batch.weights))

    def _note(self, epoch: int, problem: str) -> None:
        if epoch != self._epoch:
            self._epoch, self.unreadable = epoch, 0
        self.unreadable += 1
        limit = self._config.skip_unreadable
        self._problem = (
            f"rank {self._rank} cannot read {problem}. Mend it and continue the run, or let up to "
            f"N such samples be left out with data.skip_unreadable=N (it is {limit})"
        )
        if limit:
            print(f"rollcall: rank {self._rank} leaves out {problem}", file=sys.stderr, flush=True)

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Copy each batch to the GPU on a stream of its own, while the one before it is used."""
        if self._device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        copied: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            before = copied
            with torch.cuda.stream(stream):
                moved = Batch(*(tensor.pin_memory() for tensor in batch)).to(self._device)
                copied = moved, stream.record_event()
            if before:
                yield _hand_over(*before)
        if copied:
            yield _hand_over(*copied)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - started
            yield batch


def _hand_over(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """Let the stream of the computation wait for the copy, and keep the memory until it is used."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in batch:
        tensor.record_stream(current)
    return batch
