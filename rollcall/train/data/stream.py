"""Samples that can only be read in order: iterable data sets, shards, and torch's DataLoader.

Every rank reads a whole stream and keeps its own rows. If the data lies in shards of known length,
a rank reads only the shards with its rows. Either way, the samples of a step do not depend on the
number of ranks, and a resumed run continues with the next sample, on any number of ranks.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate, islice
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import Form, SampleError
from rollcall.train.data.packing import AHEAD, Packed, fitted
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.torch_private import tree_leaves, tree_map

PARTS = 128
"""The most parts of sharded data, a power of two; a single rank keeps one shard of each open."""


class StreamPosition(NamedTuple):
    """A position in a stream, as a checkpoint keeps it."""

    samples: int  # read so far, over all epochs
    epoch: int
    state: Any  # the data set's state_dict(); None if it has none


class Stream(Dataset[Any]):
    """The samples of an iterable, by position; earlier samples are read and dropped.

    Python's, NumPy's and torch's random numbers are seeded for each position, and for each start of
    the iterable. At its end it is started again, after `set_epoch(epoch)` if it has this method.
    """

    parts = 1  # the sample at a position belongs to the part position % parts

    def __init__(self, samples: Any, name: str, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._name = name  # of the key that names the data, for messages
        self._saved: StreamPosition | None = None
        self._size = len(samples) if hasattr(samples, "__len__") else None  # samples of an epoch
        self._first = _state_of(samples)  # some iterables continue where they were left
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

    def position(self) -> StreamPosition:
        """Return the position after the newest sample, or before the rows packed with it."""
        done = self._samples.done if isinstance(self._samples, _PackedRows) else 0
        return StreamPosition(self._at - done, self._epoch, _state_of(self._samples))

    def continue_at(self, position: StreamPosition) -> None:
        """Use this position's state for the samples after it, instead of reading those before."""
        if position.state is not None:
            self._saved = position

    def count(self) -> int:
        """Return the number of samples of an epoch; read all of them without a len()."""
        if self._size is None:
            self._size = sum(1 for _ in self._samples)
        return self._size

    def _restart(self) -> None:
        if self._first is not None:
            self._load(self._first)
        self._iterator: Iterator[Any] | None = None
        self._at = self._epoch = 0
        self._began: int | None = 0  # the position at which this epoch began; None if unknown
        self._last = None

    def _load(self, state: Any) -> None:
        try:
            self._samples.load_state_dict(state)
        except Exception as error:  # a stream may raise anything
            raise ConfigError(
                f"data.name={self._name}: load_state_dict() of {type(self._samples).__name__} "
                f"refuses the value of its state_dict(): {type(error).__name__}: {error}"
            ) from error

    def _continue_from(self, position: StreamPosition) -> None:
        self._at, self._epoch, self._last = position.samples, position.epoch, None
        self._set_epoch()  # first, because some data sets only load a state of their epoch
        self._load(position.state)
        self._iterator, self._began = iter(self._samples), None

    def _set_epoch(self) -> None:
        # Both set_epoch() and __iter__() may shuffle.
        set_seed(self._seed, "stream", "epoch", self._epoch, gpus=False)
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(self._epoch)

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._set_epoch()
                self._iterator = iter(self._samples)
            set_seed(self._seed, "stream", self._at, gpus=False)
            with suppress(StopIteration):
                sample = next(self._iterator)
                self._at += 1
                return sample
            if self._began is not None and self._size not in (None, self._at - self._began):
                raise ConfigError(
                    f"data.name={self._name}: the stream ended after {self._at - self._began} "
                    f"samples, but its len() is {self._size}; correct it, or remove __len__"
                )
            self._iterator, self._epoch, self._began = None, self._epoch + 1, self._at
        raise ConfigError(f"data.name={self._name}: the stream has no sample")


class _PackedRows:
    """Sequences of a stream, each a list of rows that fit together; some rows are read ahead."""

    def __init__(self, rows: Any, form: Form, name: str) -> None:
        self._rows, self._form, self._name = rows, form, name
        # The state of the stream before the rows read ahead, and the sequences yielded since.
        self._before, self.done = _state_of(rows), 0
        if hasattr(rows, "set_epoch"):
            self.set_epoch = rows.set_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        rows = iter(self._rows)
        self._before, self.done = _state_of(self._rows), 0
        while ahead := list(islice(rows, AHEAD)):
            groups = fitted(map(self._length, ahead), int(self._form.pad))
            for self.done, group in enumerate(groups, 1):
                yield [ahead[row] for row in group]
            self._before, self.done = _state_of(self._rows), 0

    def state_dict(self) -> Any:
        return self._before

    def load_state_dict(self, state: Any) -> None:
        self._rows.load_state_dict(state)
        self._before, self.done = state, 0

    def _length(self, row: Any) -> int:
        try:
            length = self._form.length(row)
            self._form.check_length(length)
        except SampleError as error:
            raise ConfigError(f"data.name={self._name}: a row cannot be packed: {error}") from error
        return length


class Shards(Stream):
    """The samples of shards, each an iterable of known length, in a fixed number of parts.

    A part is a run of neighboring samples of an epoch, in shards that are read in order. All parts
    have the same length, give or take one sample, and every step takes the same number of samples
    from each. So a rank reads only the shards of its parts. A shard that two parts share is read
    twice. A resumed run opens each part's current shard and drops the samples that it has seen.
    """

    def __init__(self, shards: Any, lengths: Any, name: str, seed: int, parts: int = PARTS) -> None:
        self._shards, self._lengths, self._name, self._seed = shards, lengths, name, seed
        self._samples = None  # it has no state: the position is enough to find a sample
        self._ends = list(accumulate(lengths))
        self._size = self._ends[-1] if shards else 0
        self.parts = min(parts, 1 << max(0, len(shards).bit_length() - 1))
        self._open: dict[int, _Shard] = {}  # by part

    def __getitem__(self, position: int) -> Any:
        epoch, part, sample = self.find(position)
        self._at, self._epoch = position + 1, epoch
        number = bisect_right(self._ends, sample)
        row = sample - (self._ends[number - 1] if number else 0)
        shard = self._open.get(part)
        if shard is None or shard.key != (epoch, number) or row < shard.next - 1:
            shard = self._open[part] = _Shard((epoch, number), self._start(epoch, number))
        while shard.next <= row:
            set_seed(self._seed, "shard", epoch, number, shard.next, gpus=False)
            self._advance(shard)
        return shard.last

    def __len__(self) -> int:
        return self.count()

    def find(self, position: int) -> tuple[int, int, int]:
        """Return the epoch of a position, its part, and the number of its sample in the epoch."""
        epoch, part = position // self.count(), position % self.parts
        start = epoch * self.count()
        end, parts = start + self.count(), self.parts
        # In this epoch, count all positions of earlier parts and earlier positions of this part.
        other_parts = [at // parts * part + min(at % parts, part) for at in (start, end)]
        this_part = [(at + parts - 1 - part) // parts for at in (start, position)]
        return epoch, part, other_parts[1] - other_parts[0] + this_part[1] - this_part[0]

    def _start(self, epoch: int, number: int) -> Iterator[Any]:
        shard = self._shards[number]
        set_seed(self._seed, "shard", "epoch", epoch, number, gpus=False)
        if hasattr(shard, "set_epoch"):
            shard.set_epoch(epoch)
        return iter(shard)

    def _advance(self, shard: "_Shard") -> None:
        (_, number), length = shard.key, self._lengths[shard.key[1]]
        nothing = object()
        shard.last = next(shard.rows, nothing)
        shard.next += 1
        is_short = shard.last is nothing
        if is_short or (shard.next == length and next(shard.rows, nothing) is not nothing):
            count = f"only {shard.next - 1}" if is_short else "more"
            problem = f"shard {number} has {count} samples, but its length is {length}; correct it"
            raise ConfigError(f"data.name={self._name}: {problem}")


class _Shard:
    def __init__(self, key: tuple[int, int], rows: Iterator[Any]) -> None:
        self.key, self.rows = key, rows  # epoch and number
        self.next = 0  # the row to read next
        self.last: Any = None  # the sample that was read last


def _lengths(shards: Any, given: Any, name: str) -> list[int]:
    """Return the lengths of shards; ConfigError for an unknown length or a one-time iterator."""
    if given is None:
        given = [len(shard) if hasattr(shard, "__len__") else None for shard in shards]
    if len(given) != len(shards):
        raise ConfigError(f"data.name={name} has {len(shards)} shards, but {len(given)} `lengths`")
    for number, (shard, length) in enumerate(zip(shards, given, strict=True)):
        if isinstance(shard, Iterator):
            _refuse_iterator(f"shard {number}, a {type(shard).__name__},", name)
        if not isinstance(length, Integral) or length < 0:
            raise ConfigError(
                f"data.name={name}: shard {number} has the length {length}; let len() return its "
                "number of samples, or list those of all shards in an attribute `lengths`"
            )
    return [int(length) for length in given]


def _refuse_iterator(subject: str, name: str) -> None:
    advice = "return an object whose __iter__ starts from the first sample"
    raise ConfigError(f"data.name={name}: {subject} can be read only once; {advice}")


def adapted(samples: Any, name: str, seed: int, form: Form, parts: int = 1) -> Any:
    """Return a map-style data set, packed if the form says so, or a `Stream` of an iterable.

    Sharded data has at most `parts` parts. Raise ConfigError if the data set is neither, cannot be
    packed, or is a one-time iterator.
    """
    is_map = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if is_map and not isinstance(samples, torch.utils.data.IterableDataset):
        return Packed(samples, form, name) if form.packs and len(samples) else samples
    shards = getattr(samples, "shards", None)  # iterables of samples, or names of files
    if isinstance(shards, list | tuple) and not any(
        isinstance(shard, str | bytes) or not isinstance(shard, Iterable) for shard in shards
    ):
        if form.packs:
            raise ConfigError(
                f"data.pack: data.name={name} has shards, and it is not known how many sequences "
                "their rows make; pack rows within the shards, or return an iterable without shards"
            )
        lengths = _lengths(shards, getattr(samples, "lengths", None), name)
        return Shards(shards, lengths, name, seed, parts)
    if isinstance(samples, Iterator):
        _refuse_iterator(f"a {type(samples).__name__}", name)
    if not isinstance(samples, Iterable):
        raise ConfigError(
            f"data.name={name}: expected data sets with __len__ and __getitem__, with __iter__, or "
            f"with shards, got a {type(samples).__name__}"
        )
    if isinstance(samples, DataLoader):
        samples = _RowsOf(samples)
    return Stream(_PackedRows(samples, form, name) if form.packs else samples, name, seed)


def _state_of(samples: Any) -> Any:
    """Return the state of an iterable; None if it has none, or if JSON cannot hold it."""
    has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
    if has_state and not _has_buffer(samples):
        with suppress(TypeError, ValueError):
            return json.loads(json.dumps(samples.state_dict()))
    return None


def _has_buffer(part: Any) -> bool:
    """Return True if a part is Hugging Face's `shuffle`, whose state omits the samples it holds."""
    inner = [getattr(part, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(part, "ex_iterables", ())
    is_buffer = type(part).__name__.startswith("BufferShuffled")
    return is_buffer or any(_has_buffer(child) for child in inner if child is not None)


class _RowsOf:
    """The samples of torch's DataLoader, which makes batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        if hasattr(loader, "set_epoch"):
            self.set_epoch = loader.set_epoch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            for row in range(len(tree_leaves(batch)[0])):
                yield tree_map(lambda tensor, row=row: tensor[row], batch)
