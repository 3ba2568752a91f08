"""How is a sample read, what does it draw at random, and what if it cannot be read?"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset

from train.data.source import Batch, Rows
from train.randomness import derive
from train.schema import ConfigError

NEIGHBOURS = 1000
"""Samples that are tried in place of one that cannot be read."""


class Pick(NamedTuple):
    """Which samples make a batch.

    Attributes:
        samples: their numbers.
        epochs: how often each was seen before, so that it draws anew every time.
        weights: (rows,) as in a Batch.
    """

    samples: list[int]
    epochs: list[int]
    weights: torch.Tensor


class Fetched(NamedTuple):
    """A batch, and which of its samples could not be read: epoch and words; they weigh nothing."""

    batch: Batch
    problems: list[tuple[int, str]]


class Reader:
    """Reads samples of a data set; a sample is the same in whichever batch and process it is read.

    Args:
        dataset: what is read.
        name: of the data set, for messages, such as "the training data".
        seed: of the run.
    """

    def __init__(self, dataset: Dataset[Any], name: str, seed: int) -> None:
        self._dataset = dataset
        self._name = name
        self._seed = seed

    def read(self, pick: Pick) -> Fetched:
        """Read a batch; the place of a sample that cannot be read is filled with another one.

        Raises:
            ConfigError: no sample at all can be read.
        """
        if isinstance(self._dataset, Rows):
            with suppress(Exception):  # which of them it was is found one by one
                batch = self._dataset.__getitems__(pick.samples)
                return Fetched(batch._replace(weights=pick.weights), [])
        return self._one_by_one(pick)

    def _one_by_one(self, pick: Pick) -> Fetched:
        weights = pick.weights.clone()
        parts, problems = [], []
        for row, (sample, epoch) in enumerate(zip(pick.samples, pick.epochs, strict=True)):
            try:
                parts.append(self._sample(sample, epoch))
            except Exception as error:  # data sets raise what they like
                if weights[row]:
                    problems.append((epoch, self._explain(sample, error)))
                weights[row] = 0
                parts.append(self._neighbour(sample) or self._refuse(sample, error))
        inputs, targets, _ = (torch.cat(part) for part in zip(*parts, strict=True))
        return Fetched(Batch(inputs, targets, weights), problems)

    def _sample(self, sample: int, epoch: int) -> Batch:
        if isinstance(self._dataset, Rows):
            return self._dataset[sample]
        seed = derive(self._seed, "sample", epoch, sample)
        torch.default_generator.manual_seed(seed)  # that of the CPU alone
        random.seed(seed)
        np.random.seed(seed % 2**32)
        inputs, target = (torch.as_tensor(part).unsqueeze(0) for part in self._dataset[sample])
        return Batch(inputs, target, torch.ones(1))

    def _neighbour(self, sample: int) -> Batch | None:
        """The next sample that can be read; BatchNorm would not bear zeros."""
        size = len(self._dataset)  # type: ignore[arg-type]  # samples are picked by number
        for distance in range(1, min(size, NEIGHBOURS)):
            try:
                return self._sample((sample + distance) % size, 0)
            except Exception:
                continue
        return None

    def _refuse(self, sample: int, error: Exception) -> NoReturn:
        raise ConfigError(
            f"cannot read {self._explain(sample, error)}, nor any of the samples after it"
        ) from error

    def _explain(self, sample: int, error: Exception) -> str:
        where = getattr(self._dataset, "where", None)
        file = f" ({where(sample)})" if where else ""
        reason = " ".join(str(error).split()) or "no reason given"
        return f"sample {sample} of {self._name}{file}: {type(error).__name__}: {reason}"
