"""Batches from samples: tensors of equal shape are stacked, rows of unequal length padded.

A sample is a tensor, array or number; a tuple `(input, …, target)`; or a dictionary of inputs by
the names of the model's parameters, with the target under one of `TARGETS`. They may be nested.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rollcall.train.numerics.cross_entropy import IGNORED
from rollcall.train.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

TARGETS = ("labels", "label", "targets", "target")
"""Keys under which a sample may have its target, if `data.target` names none."""
INTEGERS = "int8", "int16", "int32", "uint16", "uint32", "uint64"  # few operations take these
FLOATS = "float64", "float16", "bfloat16"  # the weights are fp32
CONVERTED = {getattr(torch, name): torch.int64 for name in INTEGERS}
CONVERTED |= {getattr(torch, name): torch.float32 for name in FLOATS}
HIDDEN = "hidden mask"
"""The name of a mask that the model does not get."""
POSITIONS = "position_ids"
"""The input with the positions of tokens in their rows, if several rows make up a sequence."""
CONTRACT = "expected tensors, arrays or numbers, or tuples and dictionaries of these"


class SampleError(ValueError):
    """A sample, or several together, break the contract; the message says how."""


@dataclass(frozen=True)
class Form:
    """Rules by which samples are put together and divided into inputs and targets."""

    target: str | None = None  # the key of the target in a dictionary; None for one of TARGETS
    pad: bool | int = False  # pad rows to the longest of a batch (True) or to a length
    packs: bool = False  # a sample is a list of rows, to be one sequence of length `pad`
    shifts: bool = False  # the loss predicts each target from those before it in its row
    mask: str | None = "attention_mask"  # the input with ones where a padded row has content
    collate: Callable[[list[Any]], Any] | None = None  # makes the whole batch of a list of samples
    is_whole: bool = False  # leave the target among the inputs, for a loss of model and batch

    def inputs_and_targets(self, samples: Sequence[Any]) -> tuple[Any, Any]:
        """Return inputs and targets, trees of tensors (rows, …); SampleError for unfit samples."""
        if self.collate is not None:
            whole = _collated(self.collate, samples)
        elif self.packs:
            whole = self._stacked([self._joined([*map(_tensors, rows)]) for rows in samples])
        else:
            whole = self._stacked([*map(_tensors, samples)])
        if self.is_whole:
            return whole, ()
        inputs, targets = self.divided(whole)
        return inputs, tree_map_only(
            torch.Tensor, lambda leaf: leaf.long() if leaf.dtype == torch.bool else leaf, targets
        )

    def divided(self, whole: Any) -> tuple[Any, Any]:
        """Divide samples into inputs and targets; without a target they are ()."""
        if isinstance(whole, Mapping):
            key = self._key(whole)
            if not (named := {name: value for name, value in whole.items() if name != key}):
                raise SampleError(f"a sample has only the key {key}; expected inputs too")
            return named, whole[key] if key is not None else ()
        if isinstance(whole, tuple | list) and len(whole) > 1:
            *inputs, targets = whole
            return inputs[0] if len(inputs) == 1 else tuple(inputs), targets
        return whole[0] if isinstance(whole, tuple | list) else whole, ()

    def _key(self, whole: Mapping[str, Any]) -> str | None:
        if self.target is not None and self.target not in whole:
            keys = ", ".join(map(str, whole))
            raise SampleError(f"data.target={self.target}: a sample has no such key, but {keys}")
        return self.target or next((key for key in TARGETS if key in whole), None)

    def length(self, sample: Any) -> int:
        """Return the length of a row; SampleError if the sample has none."""
        leaves, spec = tree_flatten(_tensors(sample))
        return len(leaves[self._lead([[leaf] for leaf in leaves], spec, sample)])

    def measured(self, inputs: Any) -> tuple[Any, torch.Tensor | None]:
        """Return inputs without a HIDDEN mask, and a mask (rows, length) of content, or None."""
        if not self.pad or self.collate is not None or isinstance(inputs, torch.Tensor):
            return inputs, None
        is_named = isinstance(inputs, Mapping)
        mask = inputs[self.mask] if is_named else inputs[-1]
        filled = mask.bool().flip(1).cummax(1).values.flip(1)  # a user's own mask may have gaps
        if self.mask != HIDDEN:
            return inputs, filled
        if is_named:
            return {name: value for name, value in inputs.items() if name != HIDDEN}, filled
        return inputs[0] if len(inputs) == 2 else inputs[:-1], filled

    def check_length(self, length: int) -> None:
        """Raise SampleError if a row, or packed rows together, are longer than `pad`."""
        if self.pad is not True and length > self.pad:
            advice = "raise it, or cut rows in the data set"
            raise SampleError(f"it has {length} entries, more than {self._key_of_length}; {advice}")

    def _stacked(self, samples: Sequence[Any]) -> Any:
        columns, spec = self._columns(samples)
        if self.pad:
            return self._padded(columns, spec, samples[0])
        return tree_unflatten([self._column(column) for column in columns], spec)

    def _columns(self, samples: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return a column of tensors for each leaf of a sample, and the samples' tree spec."""
        leaves, specs = zip(*map(tree_flatten, samples), strict=True)
        for sample, spec in zip(samples, specs, strict=True):
            if spec != specs[0]:
                other = shape_of(samples[0])
                raise SampleError(f"it is {shape_of(sample)}, but another is {other}")
        return list(zip(*leaves, strict=True)), specs[0]

    def _column(self, column: Sequence[torch.Tensor]) -> torch.Tensor:
        shapes = {tuple(tensor.shape) for tensor in column}
        if len(shapes) > 1:
            first, second, *_ = sorted(shapes)
            advice = "set data.pad=true to pad rows, or give a collate function"
            raise SampleError(f"samples have the shapes {first} and {second}; {advice}")
        return torch.stack(list(column))

    def _padded(self, columns: list[Any], spec: Any, sample: Any) -> Any:
        lengths = [len(row) for row in columns[self._lead(columns, spec, sample)]]
        longest = max(lengths) if self.pad is True else int(self.pad)
        self.check_length(max(lengths))
        targets, padded = self._target_columns(spec, len(columns)), []
        for number, column in enumerate(columns):
            if all(row.ndim for row in column) and [*map(len, column)] == lengths:
                is_class = number in targets and not column[0].is_floating_point()
                column = [_filled(row, longest, IGNORED if is_class else 0) for row in column]
            padded.append(self._column(column))
        whole = tree_unflatten(padded, spec)
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        return whole if self.mask is None else self._with(whole, self.mask, mask)

    def _joined(self, rows: Sequence[Any]) -> Any:
        """Return the rows as one sequence, with the positions of the tokens in their rows."""
        columns, spec = self._columns(rows)
        lengths = [len(row) for row in columns[self._lead(columns, spec, rows[0])]]
        if any([len(row) if row.ndim else -1 for row in column] != lengths for column in columns):
            raise SampleError(
                f"{self._key_of_length} expects each entry of a sample to be as long as its row, "
                f"but a sample is {shape_of(rows[0])}"
            )
        positions, joined = torch.cat([*map(torch.arange, lengths)]), [*map(torch.cat, columns)]
        for number in self._target_columns(spec, len(joined)) if self.shifts else ():
            joined[number] = _filled(joined[number], len(positions), IGNORED)
            joined[number][positions == 0] = IGNORED  # no row predicts the next row's first target
        return self._with(tree_unflatten(joined, spec), POSITIONS, positions)

    def _lead(self, columns: list[Any], spec: Any, sample: Any) -> int:
        """Return the column of the first input that is a row; it sets the samples' lengths."""
        targets = self._target_columns(spec, len(columns))
        for number, column in enumerate(columns):
            if number not in targets and all(row.ndim for row in column):
                return number
        raise SampleError(f"{self._key_of_length} expects rows, but a sample is {shape_of(sample)}")

    @property
    def _key_of_length(self) -> str:
        return f"data.{'pack' if self.packs else 'pad'}={self.pad}"

    def _target_columns(self, spec: Any, count: int) -> set[int]:
        return {*tree_leaves(self.divided(tree_unflatten(list(range(count)), spec))[1])}

    def _with(self, whole: Any, name: str, values: torch.Tensor) -> Any:
        """Add an input: under its name in a dictionary, otherwise as the last input."""
        if isinstance(whole, Mapping):
            return whole if name in whole else {**whole, name: values}
        if isinstance(whole, tuple) and len(whole) > 1:
            return (*whole[:-1], values, whole[-1])
        return {"input": whole, name: values} if self.is_whole else (whole, values, ())


def _collated(collate: Callable[[list[Any]], Any], samples: Sequence[Any]) -> Any:
    name = getattr(collate, "__name__", type(collate).__name__)
    try:
        whole = collate(list(samples))
    except Exception as error:
        text = " ".join(str(error).split())
        raise SampleError(f"{name}() fails: {type(error).__name__}: {text}") from error
    whole = _tensors(dict(whole) if isinstance(whole, Mapping) else whole)
    for leaf in tree_leaves(whole):
        if not leaf.ndim or len(leaf) != len(samples):
            raise SampleError(
                f"{name}() returned a tensor of shape {tuple(leaf.shape)} for {len(samples)} "
                "samples; expected one row for each"
            )
    return whole


def _tensors(sample: Any, part: str = "it") -> Any:
    """Return a sample as tensors: floats in fp32, like the weights, integers but bytes in int64."""
    if isinstance(sample, Mapping):
        if wrong := [key for key in sample if not isinstance(key, str)]:
            raise SampleError(f"{part} has the key {wrong[0]!r}; expected names of parameters")
        return {key: _tensors(value, f"its {key!r}") for key, value in sample.items()}
    if isinstance(sample, tuple) or (isinstance(sample, list) and not _is_numbers(sample)):
        if not sample:
            raise SampleError(f"{part} is empty; {CONTRACT}")
        return tuple(_tensors(value, f"its part {number}") for number, value in enumerate(sample))
    if isinstance(sample, torch.Tensor | np.ndarray | np.generic | bool | int | float | list):
        try:
            is_empty = isinstance(sample, list) and not sample  # torch would make it floats
            tensor = torch.as_tensor(sample, dtype=torch.int64 if is_empty else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SampleError(f"{part} is not a tensor: {error}") from None
        if tensor.layout != torch.strided:
            raise SampleError(f"{part} is a sparse tensor; return its to_dense()")
        return tensor.to(CONVERTED.get(tensor.dtype, tensor.dtype))
    kind = "None" if sample is None else f"a {type(sample).__name__}"
    hint = {"Image": "; turn images into tensors", "str": "; turn text into numbers"}
    raise SampleError(f"{part} is {kind}; {CONTRACT}{hint.get(type(sample).__name__, '')}")


def _is_numbers(sample: list[Any]) -> bool:
    first = sample[0] if sample else 0
    return _is_numbers(first) if isinstance(first, list) else isinstance(first, int | float)


def _filled(row: torch.Tensor, length: int, value: int) -> torch.Tensor:
    row = row.long() if value == IGNORED else row  # no byte is -100
    return functional.pad(row, [0, 0] * (row.ndim - 1) + [0, length - len(row)], value=value)


def shape_of(sample: Any) -> str:
    """Describe a sample, for messages."""
    if isinstance(sample, Mapping):
        return f"a dictionary with the keys {', '.join(map(str, sample))}"
    if isinstance(sample, tuple):
        return f"a tuple of {len(sample)}"
    return f"a tensor of shape {tuple(sample.shape)}"
