"""Read samples: seed the random numbers of each, and replace the unreadable ones."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import Form, SampleError
from rollcall.train.data.source import Batch, BatchDataset
from rollcall.train.data.stream import Stream, StreamPosition
from rollcall.train.numerics.randomness import set_seed

NEIGHBOURS = 1000
"""Following samples that are tried in place of an unreadable one."""


class Selection(NamedTuple):
    """The samples of a batch."""

    samples: list[int]  # indices in the data set
    epochs: list[int]  # of each; a sample gets new random numbers in every epoch
    weights: torch.Tensor  # (rows,) as in a Batch


class ReadResult(NamedTuple):
    """A batch, and the epoch and error of each unreadable sample, whose weight is zero."""

    batch: Batch
    problems: list[tuple[int, str]]
    position: StreamPosition | None = None  # after the batch, in a stream


@dataclass(frozen=True)
class Reader:
    """Reads samples of a data set, each independently of the batch and process that reads it."""

    _dataset: Dataset[Any]
    _name: str  # for messages, such as "the training data"
    _seed: int
    _form: Form = field(default_factory=Form)
    _source: str = ""  # the value of data.name, for messages

    def read(self, selection: Selection) -> ReadResult:
        """Read a batch, with the next sample for an unreadable one; ConfigError without any."""
        batches = self._dataset if isinstance(self._dataset, BatchDataset) else None
        if self._form.collate is not None:  # sample by sample
            batches = None
        if batches is not None:
            # One by one, they show which sample is unreadable.
            with suppress(Exception, SystemExit):
                whole = batches.__getitems__(selection.samples)
                if isinstance(whole, Batch):
                    return ReadResult(self._whole(whole, selection.weights), [])
        weights = selection.weights.clone()
        parts: list[Any] = []
        problems: list[tuple[int, str]] = []
        for row, (sample, epoch) in enumerate(zip(*selection[:2], strict=True)):
            try:
                parts.append(self._sample(sample, epoch))
            except (Exception, SystemExit) as error:  # a data set may raise anything
                if weights[row]:
                    problems.append((epoch, self._explain(sample, error)))
                weights[row] = 0
                parts.append(self._neighbour(sample, error))
        if batches is not None:
            return ReadResult(self._whole(Batch.joined(parts), weights), problems)
        batch = Batch(*self._put_together(parts, selection), weights)
        position = self._dataset.position() if isinstance(self._dataset, Stream) else None
        return ReadResult(batch, problems, position)

    def _whole(self, batch: Batch, weights: torch.Tensor) -> Batch:
        if self._form.is_whole:
            return Batch((batch.inputs, batch.targets), (), weights)
        return Batch(batch.inputs, batch.targets, weights)

    def _put_together(self, parts: list[Any], selection: Selection) -> tuple[Any, Any]:
        try:
            return self._form.inputs_and_targets(parts)
        except SampleError as error:
            row, reason = 0, error
            for number, part in reversed([*enumerate(parts)]):  # the first that does not fit row 0
                try:
                    self._form.inputs_and_targets([parts[0], part][: number + 1])
                except SampleError as own:
                    row, reason = number, own
            source = f" (data.name={self._source})" if self._source else ""
            raise ConfigError(
                f"sample {selection.samples[row]} of {self._name}{source}: {reason}"
            ) from None

    def _sample(self, sample: int, epoch: int) -> Any:
        if isinstance(self._dataset, Stream):
            return self._dataset[sample]
        if isinstance(self._dataset, BatchDataset):
            batch = self._dataset[sample]
            if not isinstance(batch, Batch):
                name = type(self._dataset).__name__
                raise TypeError(f"{name} returned a {type(batch).__name__}; expected a Batch")
            if self._form.collate is None:
                return batch
        set_seed(self._seed, "sample", epoch, sample, gpus=False)
        if isinstance(self._dataset, BatchDataset):
            return batch.map(lambda rows: rows[0])[:2]
        return self._dataset[sample]

    def _neighbour(self, sample: int, error: BaseException) -> Any:
        """Return the next readable sample; zeros would distort the statistics of BatchNorm."""
        if isinstance(self._dataset, Stream):
            raise ConfigError(f"cannot read {self._explain(sample, error)}") from error
        size = len(self._dataset)  # type: ignore[arg-type]  # samples are read by index
        for distance in range(1, min(size, NEIGHBOURS)):
            with suppress(Exception, SystemExit):
                return self._sample((sample + distance) % size, 0)
        problem = self._explain(sample, error)
        raise ConfigError(f"cannot read {problem}, nor any sample after it") from error

    def _explain(self, sample: int, error: BaseException) -> str:
        where = getattr(self._dataset, "where", None)
        file = f" ({where(sample)})" if where else ""
        reason = " ".join(str(error).split()) or "no reason given"
        return f"sample {sample} of {self._name}{file}: {error_prefix(error)}{reason}"


def error_prefix(error: BaseException) -> str:
    """Return the type to put before an error's message; empty for messages to the user."""
    return "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
