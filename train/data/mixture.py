"""Weighted mixtures of data sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError


class Mixture(Dataset[Any]):
    """Samples of several map-style data sets, in proportion to weights.

    Those of each set are taken in turn, so that their counts differ by at most one. They come one
    set after another: the order of the training mixes them.
    """

    def __init__(self, sets: Sequence[Any], weights: Sequence[float], size: int = 0) -> None:
        """Mix data sets in proportion to their weights.

        Args:
            size: samples of an epoch; by default as many as it takes to draw each at least once.

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
        rounds = max(len(one) / part for one, part in zip(sets, share, strict=True) if part)
        counts = np.ceil(share * rounds - 1e-6)
        self._ends = np.rint((share * size if size else counts).cumsum()).astype(np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        place, inner = self._place(index)
        return self._sets[place][inner]

    def where(self, index: int) -> str:
        """Return which data set a sample comes from, and its number there."""
        place, inner = self._place(index)
        return f"sample {inner} of set {place}"

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a loop over the samples
        place = int(np.searchsorted(self._ends, index, "right"))
        first = self._ends[place - 1] if place else 0
        return place, int(index - first) % len(self._sets[place])
