"""What a data source is: samples that a rank can pick by number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset


class Batch(NamedTuple):
    """Samples of one step, or one rank's part of them.

    Attributes:
        inputs: (rows, *shape).
        targets: (rows, …) class numbers, one for each thing that the model classifies.
        weights: (rows,) one for a sample, zero for padding: what has no weight counts nowhere.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device; a copy from pinned memory is not waited for."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


@dataclass(frozen=True)
class Source:
    """Training and validation samples of one data set.

    The data sets are `Rows`, or any of torch's that have a (input, target) for each number. Those
    may draw at random: every sample has seeds of its own. They may have a method `where(row)`,
    which names the file of a sample for messages.

    Attributes:
        shape: of one sample's input, without the batch.
        classes: how many there are.
        names: of the classes, if they have any.
        read: makes samples of a user's files, for `python -m train predict`. The sources here need
            none: see `readers.py`.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    train_size: int
    validation_size: int
    shape: tuple[int, ...]
    classes: int
    names: tuple[str, ...] = ()
    read: Callable[[Sequence[Path]], Dataset[Any]] | None = None


class Rows(Dataset[Batch]):
    """Samples of which many are read at once; nothing is drawn at random."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def __getitems__(self, rows: list[int]) -> Batch:
        """These samples as one batch."""

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])


class InMemory(Rows):
    """Samples that lie in two tensors; rows are picked in one indexing, not one by one."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch."""
        index = torch.tensor(rows)
        return Batch(self.inputs[index], self.targets[index], torch.ones(len(rows)))
