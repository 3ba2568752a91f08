"""This rank's batches of a data set, for your own training loop."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.order import Order
from rollcall.train.dist.world import World


class Loader:
    """torch's DataLoader over this rank's share of every batch, for training or evaluation.

    With `shuffle`, every pass is a new permutation, the same for any number of ranks; the samples
    that do not fill the last batch are left out of this pass. Without it, every sample comes once
    over all ranks, and ranks may have different numbers of batches. It may be given to a
    `Checkpointer`, which then saves the number of passes.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        world: World,
        *,
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Load batches of `global_batch` samples over all ranks.

        Args:
            options: further ones of torch's DataLoader, such as `num_workers` or `collate_fn`.

        Raises:
            ConfigError: the batch cannot be divided equally among the ranks, or `shuffle` would
                leave out all samples.
        """
        self.world = world
        self._dataset, self._options = dataset, options
        self._size = len(dataset)  # type: ignore[arg-type]  # a map-style data set
        self._share, rest = divmod(global_batch, world.world_size)
        self._shuffle, self._seed, self._passes = shuffle, seed, 0
        if rest or not self._share:
            raise ConfigError(
                f"a batch of {global_batch} samples cannot be divided equally among "
                f"{world.world_size} ranks; choose a multiple of {world.world_size}"
            )
        if shuffle and self._size < global_batch:
            raise ConfigError(
                f"a batch of {global_batch} samples is larger than the data set of {self._size} "
                "samples; choose a smaller batch"
            )

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        self._passes += 1
        return iter(DataLoader(self._dataset, batch_sampler=batches, **self._options))

    def state_dict(self) -> dict[str, int]:
        """Return how many passes have begun."""
        return {"passes": self._passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the pass after these."""
        self._passes = state["passes"]

    def _batches(self) -> list[list[int]]:
        rank, ranks, share = self.world.rank, self.world.world_size, self._share
        if self._shuffle:
            order = Order(self._size, self._size * (self._passes + 1), self._size, self._seed)
            samples, _ = order.samples(self._passes, range(self._size))
            whole = self._size // (ranks * share)
            starts = ((number * ranks + rank) * share for number in range(whole))
            return [samples[start : start + share] for start in starts]
        own = range(rank, self._size, ranks)
        return [[*own[first : first + share]] for first in range(0, len(own), share)]
