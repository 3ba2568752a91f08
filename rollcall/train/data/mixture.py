"""Weighted mixtures of data sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError


class Mixture(Dataset[Any]):
    """Samples of several map-style data sets, in proportion to weights.

    The samples of a set are repeated in turn, so that their counts differ by at most one. The sets
    follow each other: the order of the training mixes them.
    """

    def __init__(self, sets: Sequence[Any], weights: Sequence[float]) -> None:
        """Mix data sets by weight, in any unit; raise ConfigError if the weights do not fit."""
        if len(sets) != len(weights) or min(weights, default=0) < 0 or not sum(weights):
            raise ConfigError(
                f"a mixture of {len(sets)} data sets expects one weight for each, not "
                f"negative, got {list(weights)}"
            )
        if empty := [number for number, samples in enumerate(sets) if not len(samples)]:
            raise ConfigError(f"a mixture needs samples in each data set; set {empty[0]} has none")
        self._sets = list(sets)
        share = np.array(weights, dtype=float) / sum(weights)
        rounds = max(len(samples) / part for samples, part in zip(sets, share, strict=True) if part)
        self._ends = np.ceil(share * rounds - 1e-6).cumsum().astype(np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        number, sample = self._find(index)
        return self._sets[number][sample]

    def where(self, index: int) -> str:
        """Return the data set of a sample, and its number there."""
        number, sample = self._find(index)
        return f"sample {sample} of set {number}"

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a loop over the samples
        number = int(np.searchsorted(self._ends, index, "right"))
        first = self._ends[number - 1] if number else 0
        return number, int(index - first) % len(self._sets[number])
