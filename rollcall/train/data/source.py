"""The interface of a data set: samples that a rank reads by index."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.form import Form
from rollcall.train.numerics.losses import Loss, are_valid
from rollcall.train.torch_private import tree_leaves, tree_map, tree_map_only

ReadFiles = Callable[[Sequence[Path]], Dataset[Any]]
"""Makes a data set of files, for `rollcall predict`."""
Load = TypeVar("Load", bound=Callable[..., Any])


class Batch(NamedTuple):
    """The samples of a step, or of a rank: tensors (rows, …), or containers of such tensors."""

    inputs: Any  # a tensor, a tuple for several arguments of the model, or a dictionary of them
    targets: Any  # class numbers, one for each thing that the model classifies; () for none
    weights: torch.Tensor  # (rows,): 1 for a sample, 0 for padding, which is never counted

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device. A copy from pinned memory is asynchronous."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with each tensor replaced by what the function returns for it."""
        return Batch(*(tree_map_only(torch.Tensor, function, part) for part in self))

    def split(self, rows: int) -> "list[Batch]":
        """Return the batch in pieces of so many rows, of which the last may have fewer."""
        starts = range(0, len(self.weights), rows)
        return [self.map(lambda tensor, at=at: tensor[at : at + rows]) for at in starts]  # type: ignore[misc]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, the weights last."""
        if isinstance(self.inputs, torch.Tensor) and isinstance(self.targets, torch.Tensor):
            return list(self)  # a tree's functions take ten times as long
        return [leaf for part in self for leaf in tree_leaves(part)]

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """Return the rows of several batches as one batch."""
        if len(batches) == 1:
            return batches[0]
        fields = zip(*batches, strict=True)  # inputs, targets, weights
        return Batch(*(tree_map(lambda *rows: torch.cat(rows), *trees) for trees in fields))


@dataclass(frozen=True)
class Source:
    """The training and validation samples of one data set.

    Both are a `BatchDataset`, or any torch Dataset that returns a sample for an index; `form.py`
    lists what a sample may be. It may use random numbers: the generators are seeded for each
    sample. Optional methods: `where(index)` returns the file of a sample for messages,
    `raw(index)` its undecoded bytes.
    """

    train: Dataset[Any]
    validation: Dataset[Any]  # empty if the run has no validation
    train_size: int = -1  # by default len(); for a stream without one, the samples of the run
    validation_size: int = -1
    shape: tuple[int, ...] = ()  # of one input, without the batch dimension; () if unknown
    classes: int = 0  # the number of classes; 0 if unknown
    names: tuple[str, ...] = ()  # of the classes; () if unknown
    read: ReadFiles | None = None  # makes samples of a user's files, for `rollcall predict`
    further: Mapping[str, Dataset[Any]] = field(default_factory=dict)  # validation sets by name
    form: Form = field(default_factory=Form)  # rules to make batches of samples
    is_shifted: bool = False  # whether targets are the next tokens, for a loss that does not shift

    def __post_init__(self) -> None:
        for size, samples in (("train_size", self.train), ("validation_size", self.validation)):
            if getattr(self, size) < 0 and hasattr(samples, "__len__"):
                object.__setattr__(self, size, len(samples))

    def learned_by(self, loss: Loss) -> "Source":
        """Return the source in the form that a loss needs; ConfigError if both shift targets."""
        if self.is_shifted and (loss.shifts or loss.is_of_transformers):
            raise ConfigError(
                f"train.loss={loss.name} predicts each target from those before it, but the "
                "targets of this data set are the next tokens already: use cross_entropy"
            )
        return replace(self, form=replace(self.form, is_whole=loss.takes_model, shifts=loss.shifts))

    @property
    def validations(self) -> dict[str, tuple[Dataset[Any], int]]:
        """The validation sets by name, with their sizes; the first has an empty name."""
        if not self.validation_size:
            return {}
        sets: dict[str, Any] = {"": (self.validation, self.validation_size)}
        for name, samples in self.further.items():
            size = len(samples) if hasattr(samples, "__len__") else samples.count()  # type: ignore[attr-defined]
            sets[name] = samples, size
        return sets


def data_set(
    *,
    augments: bool = False,
    slow_imports: Sequence[str] = (),
    reader: Callable[[Data, int], ReadFiles] | None = None,
) -> Callable[[Load], Load]:
    """Declare the abilities of a data set; decorates the function that loads it.

    It may implement `data.augment`. Nodes import its `slow_imports` before they fork their ranks.
    The `reader` makes a `ReadFiles` of config.data and the number of classes.
    """

    def declare(load: Load) -> Load:
        load.__dict__.update(augments=augments, slow_imports=slow_imports, reader=reader)
        return load

    return declare


class BatchDataset(Dataset[Batch]):
    """Samples that are read as whole batches, without random numbers."""

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
            counts = f"{len(targets)} and {len(inputs)}"
            raise ConfigError(f"InMemory expects as many targets as inputs, got {counts}")
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def all_count(self) -> bool:
        """True if no target is -100, so that ranks need not count them."""
        return bool(are_valid(self.targets).all())

    def __getitems__(self, indices: list[int]) -> "Batch":
        index = torch.from_numpy(np.array(indices))
        inputs, targets = self.inputs.index_select(0, index), self.targets.index_select(0, index)
        return Batch(inputs, targets, torch.ones(len(indices)))
