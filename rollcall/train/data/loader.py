"""This rank's batches of a data set, for your own training loop."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.order import Order
from rollcall.train.ranks.world import World


class Loader:
    """torch's DataLoader over this rank's share of every batch, for training or evaluation.

    With `shuffle`, every pass is a new permutation, the same for any number of ranks, without the
    samples that do not fill the last batch. Without it, every sample comes once over all ranks, and
    ranks may have different numbers of batches. A `Checkpointer` that is given the loader saves its
    number of passes and the place in the current one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int = 0,
        world: World | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Load batches of `global_batch` samples over all ranks.

        Args:
            dataset: a map-style data set.
            global_batch: the batch of all ranks together; also as `batch_size`.
            world: the ranks; default: all that this process has joined.
            options: options of torch's DataLoader, such as `num_workers` or `collate_fn`.

        Raises:
            ConfigError: the batch cannot be divided equally among the ranks, or `shuffle` would
                leave out all samples.
        """
        global_batch = int(global_batch or options.pop("batch_size", 0))
        if shuffle:
            options.pop("drop_last", None)  # they are left out
        DataLoader(dataset, batch_sampler=[], **options)  # refuses wrong options now
        self.world = world = world or World.joined or World.join()
        self._dataset, self._options = dataset, options
        self._size = len(dataset)  # type: ignore[arg-type]  # a map-style data set
        self._share, rest = divmod(global_batch, world.world_size)
        self._shuffle, self._seed = shuffle, seed
        self._passes = self._done = 0  # passes that have ended, and batches of the current one
        self._is_open = False
        if rest or self._share < 1:
            raise ConfigError(
                f"a batch of {global_batch} samples cannot be divided equally among "
                f"{world.world_size} ranks; choose {world.world_size}, or a multiple of this"
            )
        if shuffle and self._size < global_batch:
            raise ConfigError(
                f"a batch of {global_batch} samples is larger than the data set of {self._size} "
                "samples; choose a smaller batch"
            )

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[Any]:
        if self._is_open:  # the pass before was left
            self._passes, self._done = self._passes + 1, 0
        self._is_open = True
        rest = self._batches()[self._done :]
        loader = DataLoader(self._dataset, batch_sampler=rest, **self._options)
        return self._count(iter(loader), self._passes)

    def _count(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        try:
            for batch in batches:
                self._done += number == self._passes
                yield batch
        finally:
            if number == self._passes:
                self._passes, self._done, self._is_open = number + 1, 0, False

    def state_dict(self) -> dict[str, list[int]]:
        """Return the number of passes that have ended, and of batches in the current one."""
        return {"passes": [self._passes, self._done]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after these batches."""
        self._passes, self._done = state["passes"]
        self._is_open = False

    def _batches(self) -> list[list[int]]:
        rank, ranks, share = self.world.rank, self.world.world_size, self._share
        if self._shuffle:
            order = Order(self._size, self._size * (self._passes + 1), self._size, self._seed)
            samples, _ = order.samples(self._passes, range(self._size))
            full_batches = self._size // (ranks * share)
            starts = ((number * ranks + rank) * share for number in range(full_batches))
            return [samples[start : start + share] for start in starts]
        samples = [*range(rank, self._size, ranks)]
        return [samples[first : first + share] for first in range(0, len(samples), share)]
