"""Weighted mixtures of data sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError


class Mixture(Dataset[Any]):
    """Samples of several map-style data sets, each drawn with a probability.

    Which data set a sample comes from depends on the seed alone. The samples of each are taken in
    turn, so that their counts differ by at most one.
    """

    def __init__(
        self, sets: Sequence[Any], weights: Sequence[float], size: int = 0, seed: int = 0
    ) -> None:
        """Mix data sets in proportion to their weights.

        Args:
            size: samples of an epoch; by default the number in all sets together.

        Raises:
            ConfigError: the weights do not fit the sets.
        """
        if len(sets) != len(weights) or min(weights, default=0) < 0 or not sum(weights):
            raise ConfigError(
                f"a mixture of {len(sets)} data sets expects one weight for each, not "
                f"negative, got {list(weights)}"
            )
        if empty := [place for place, one in enumerate(sets) if not len(one)]:
            raise ConfigError(
                f"a mixture expects samples in each data set; set {empty[0]} has none"
            )
        self._sets = list(sets)
        share = np.array(weights, dtype=float) / sum(weights)
        count = size or sum(len(one) for one in sets)
        self._which = np.random.default_rng(seed).choice(len(sets), count, p=share)
        self._inner = np.empty(count, dtype=np.int64)
        for place, one in enumerate(sets):
            own = self._which == place
            self._inner[own] = np.arange(own.sum()) % len(one)

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Any:
        return self._sets[self._which[index]][int(self._inner[index])]

    def where(self, index: int) -> str:
        """Return which data set a sample comes from, and its number there."""
        return f"sample {self._inner[index]} of set {self._which[index]}"
