"""The interface of a data set: samples that a rank reads by index."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.form import Form
from rollcall.train.numerics.losses import Loss

ReadFiles = Callable[[Sequence[Path]], Dataset[Any]]
"""Makes a data set of files, for `rollcall predict`."""
Load = TypeVar("Load", bound=Callable[..., Any])


class Batch(NamedTuple):
    """The samples of one step, or one rank's share of them.

    Inputs and targets are tensors (rows, …), or tuples, lists and dictionaries of such tensors.
    """

    inputs: Any  # a tensor, a tuple for several arguments of the model, or a dictionary of them
    targets: Any  # class numbers, one for each thing that the model classifies; () for none
    weights: torch.Tensor  # (rows,) one for a sample, zero for padding, which counts nowhere

    def to(self, device: torch.device) -> "Batch":
        """Return it on a device. A copy from pinned memory is asynchronous."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with each tensor replaced by what the function returns for it."""
        return Batch(*(tree_map_only(torch.Tensor, function, part) for part in self))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, the weights last."""
        if isinstance(self.inputs, torch.Tensor) and isinstance(self.targets, torch.Tensor):
            return list(self)  # a tree's functions take ten times as long
        return [leaf for part in self for leaf in tree_leaves(part)]

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """Return the rows of several batches as one."""
        if len(batches) == 1:
            return batches[0]
        parts = zip(*batches, strict=True)
        return Batch(*(tree_map(lambda *rows: torch.cat(rows), *each) for each in parts))


@dataclass(frozen=True)
class Source:
    """The training and validation samples of one data set.

    Both are a `BatchDataset`, or any torch Dataset that returns a sample for an index; `form.py`
    lists what a sample may be. It may use random numbers: the generators are seeded for each
    sample. Optional methods: `where(index)` returns the file of a sample for messages,
    `raw(index)` its undecoded bytes.
    """

    train: Dataset[Any]
    validation: Dataset[Any]  # of no samples if there is none
    train_size: int = -1  # found by len(); for a stream without one, the samples of the run
    validation_size: int = -1
    shape: tuple[int, ...] = ()  # of one input, without the batch dimension; () if unknown
    classes: int = 0  # how many; 0 if unknown
    names: tuple[str, ...] = ()  # of the classes, if they have any
    read: ReadFiles | None = None  # makes samples of a user's files, for `rollcall predict`
    further: Mapping[str, Dataset[Any]] = field(default_factory=dict)  # validation sets by name
    form: Form = field(default_factory=Form)  # how samples become a batch

    def __post_init__(self) -> None:
        for size, samples in (("train_size", self.train), ("validation_size", self.validation)):
            if getattr(self, size) < 0 and hasattr(samples, "__len__"):
                object.__setattr__(self, size, len(samples))

    def learned_by(self, loss: Loss) -> "Source":
        """Return the source whose batches are made as this loss needs them."""
        return replace(self, form=replace(self.form, is_whole=loss.takes_model, shifts=loss.shifts))

    @property
    def validations(self) -> dict[str, tuple[Dataset[Any], int]]:
        """The validation sets by name, with their sizes; the first has an empty name."""
        more: dict[str, Any] = {
            name: (one, len(one) if hasattr(one, "__len__") else one.count())  # type: ignore[attr-defined]
            for name, one in self.further.items()
        }
        if not self.validation_size:
            return {}
        return {"": (self.validation, self.validation_size), **more}


def data_set(
    *,
    augments: bool = False,  # whether it implements `data.augment`
    slow_imports: Sequence[str] = (),  # of loading; a node imports them before it forks ranks
    reader: Callable[[Data, int], ReadFiles] | None = None,  # for (config.data, number of classes)
) -> Callable[[Load], Load]:
    """Declare abilities of a data set; decorates the function that loads it."""

    def declare(load: Load) -> Load:
        load.__dict__.update(augments=augments, slow_imports=slow_imports, reader=reader)
        return load

    return declare


class BatchDataset(Dataset[Batch]):
    """Samples that can be read many at once, without random numbers."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> "Batch":
        """Return these samples as one batch."""

    def __getitem__(self, index: int) -> "Batch":
        return self.__getitems__([index])


class InMemory(BatchDataset):
    """Samples in two tensors; a batch is one indexing operation."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if len(inputs) != len(targets):
            raise ConfigError(
                f"InMemory expects as many targets as inputs, got {len(targets)} and {len(inputs)}"
            )
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def all_count(self) -> bool:
        """Whether no target is -100, so that no batch need be searched for it."""
        return bool((self.targets >= 0).all())

    def __getitems__(self, indices: list[int]) -> "Batch":
        index = torch.from_numpy(np.array(indices))
        inputs, targets = (one.index_select(0, index) for one in (self.inputs, self.targets))
        return Batch(inputs, targets, torch.ones(len(indices)))
