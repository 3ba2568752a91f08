"""Samples that can only be read in order: iterable data sets, and torch's DataLoader.

Every rank reads the whole stream and keeps its own rows. So the samples of a step do not depend on
the number of ranks, and a resumed run continues with the next sample, on any number of ranks.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import Form
from rollcall.train.data.packing import Packed
from rollcall.train.numerics.randomness import set_cpu_seed


class Place(NamedTuple):
    """A place in a stream, as a checkpoint keeps it."""

    samples: int  # read so far, over all epochs
    epoch: int
    state: Any  # what the data set's state_dict() returned; None if it has none


class Stream(Dataset[Any]):
    """The samples of an iterable, by their position; those before it are read and dropped.

    Python's, NumPy's and torch's random numbers are seeded for each position, and for each start of
    the iterable. At its end it is started again, after `set_epoch(epoch)` if it has this method.
    """

    def __init__(self, samples: Any, name: str, seed: int) -> None:
        self._samples = samples
        self._name = name  # of the key that names the data, for messages
        self._seed = seed
        self._saved: Place | None = None
        self._first = self._state()  # some iterables continue where they were left
        self._last: Any = None
        self._restart()

    def __getitem__(self, position: int) -> Any:
        if position == self._at - 1:
            return self._last
        if position < self._at:
            self._restart()
        if self._saved and self._at < self._saved.samples <= position:
            self._continue_from(self._saved)
        while self._at <= position:
            self._last = self._next()
        return self._last

    def place(self) -> Place:
        """Return the place behind the newest sample."""
        return Place(self._at, self._epoch, self._state())

    def _state(self) -> Any:
        has_state = hasattr(self._samples, "state_dict") and hasattr(
            self._samples, "load_state_dict"
        )
        if has_state and not _has_buffer(self._samples):
            with suppress(TypeError, ValueError):  # a checkpoint keeps what JSON can hold
                return json.loads(json.dumps(self._samples.state_dict()))
        return None

    def continue_at(self, place: Place) -> None:
        """Use the state of this place for samples behind it, instead of reading those before."""
        if place.state is not None:
            self._saved = place

    def count(self) -> int:
        """Return the number of samples of an epoch; without a length all of them are read."""
        if hasattr(self._samples, "__len__") and not isinstance(self._samples, DataLoader):
            return len(self._samples)
        return sum(1 for _ in self._rows())

    def _restart(self) -> None:
        if self._first is not None:
            self._samples.load_state_dict(self._first)
        self._iterator: Iterator[Any] | None = None
        self._at = self._epoch = 0
        self._last = None

    def _continue_from(self, place: Place) -> None:
        self._at, self._epoch, self._last = place.samples, place.epoch, None
        self._set_epoch()  # first: some load a state only if it is of their epoch
        self._samples.load_state_dict(place.state)
        self._iterator = self._rows()

    def _set_epoch(self) -> None:
        set_cpu_seed(
            self._seed, "stream", "epoch", self._epoch
        )  # it may shuffle, and so may __iter__
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(self._epoch)

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._set_epoch()
                self._iterator = self._rows()
            set_cpu_seed(self._seed, "stream", self._at)
            with suppress(StopIteration):
                sample = next(self._iterator)
                self._at += 1
                return sample
            self._iterator, self._epoch = None, self._epoch + 1
        raise ConfigError(f"data.name={self._name}: the stream has no sample")

    def _rows(self) -> Iterator[Any]:
        if not isinstance(self._samples, DataLoader):
            return iter(self._samples)
        return _rows_of_batches(self._samples)


def adapted(samples: Any, name: str, seed: int, form: Form) -> Any:
    """Return a map-style data set, packed if the form says so, and an iterable as a `Stream`.

    Raises:
        ConfigError: it is neither, cannot be packed, or is an iterator, which can be read once.
    """
    is_map = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if is_map and not isinstance(samples, torch.utils.data.IterableDataset):
        return Packed(samples, form, name) if form.packs and len(samples) else samples
    if form.packs:
        raise ConfigError(f"data.pack: data.name={name} is a stream; pack the rows in the stream")
    if isinstance(samples, Iterator):
        raise ConfigError(
            f"data.name={name}: a {type(samples).__name__} can be read only once; return an object "
            "whose __iter__ starts from the first sample"
        )
    if not isinstance(samples, Iterable):
        raise ConfigError(
            f"data.name={name}: expected data sets with __len__ and __getitem__, or with __iter__, "
            f"got a {type(samples).__name__}"
        )
    return Stream(samples, name, seed)


def _has_buffer(part: Any) -> bool:
    """Return whether Hugging Face's `shuffle` is in it, whose state omits the samples it holds."""
    inner = [getattr(part, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(part, "ex_iterables", ())
    is_buffer = type(part).__name__.startswith("BufferShuffled")
    return is_buffer or any(_has_buffer(one) for one in inner if one is not None)


def _rows_of_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    for batch in loader:
        leaf = torch.utils._pytree.tree_leaves(batch)[0]
        for row in range(len(leaf)):
            yield tree_map(lambda tensor, row=row: tensor[row], batch)
