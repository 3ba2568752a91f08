"""What a data source is: samples that a rank can pick by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    Attributes:
        shape: of one sample's input, without the batch.
        classes: how many there are.
    """

    train: Dataset[Batch]
    validation: Dataset[Batch]
    train_size: int
    validation_size: int
    shape: tuple[int, ...]
    classes: int


class InMemory(Dataset[Batch]):
    """Samples that lie in two tensors; rows are picked in one indexing, not one by one."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch; torch's DataLoader calls this for a whole batch."""
        index = torch.tensor(rows)
        return Batch(self.inputs[index], self.targets[index], torch.ones(len(rows)))
