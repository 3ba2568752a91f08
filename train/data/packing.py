"""Several rows of unequal length in one sequence, which compute the same as each row alone.

A packed sequence holds rows behind each other, then padding. Its `position_ids` begin at 0 in each
row, so they also say which tokens belong together: attention must not cross into another row.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import POSITIONS, Form, SampleError
from rollcall.train.data.source import Batch, BatchDataset

CLOSE = 1e-3
"""Relative difference of outputs that rounding may explain."""
AHEAD = 1024
"""Rows of a stream that are packed together."""


def same_row(position_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens are of the same row: (rows, length) to (rows, 1, length, length)."""
    number = (position_ids == 0).cumsum(1)
    return (number[:, :, None] == number[:, None, :]).unsqueeze(1)


class Packed(Dataset[list[Any]]):
    """Lists of rows of a map-style data set, each list one sequence."""

    def __init__(self, rows: Any, form: Form, name: str) -> None:
        """Put rows together by their lengths: the attribute `lengths`, or all rows are read."""
        if isinstance(rows, BatchDataset):
            raise ConfigError(f"data.pack: the rows of data.name={name} have one length; remove it")
        known, lengths = getattr(rows, "lengths", None), list[int]()
        if known is not None and len(known) != len(rows):
            raise ConfigError(
                f"data.pack: data.name={name} has {len(rows)} rows, but {len(known)} `lengths`"
            )
        for row in range(len(rows)):
            try:
                lengths.append(form.length(rows[row]) if known is None else int(known[row]))
                form.check_length(lengths[-1])
            except Exception as error:  # a data set may raise anything
                kind = "" if isinstance(error, SampleError) else f"{type(error).__name__}: "
                why = f"row {row} cannot be packed: {kind}{error}"
                raise ConfigError(f"data.name={name}: {why}") from error
        self.rows, self._groups = rows, fitted(lengths, int(form.pad))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.rows[row] for row in self._groups[index]]


def fitted(lengths: Iterable[int], size: int) -> list[list[int]]:
    """Return groups of rows of at most `size` together: the longest, then what still fits."""
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(int(length), []).append(row)
    known, found = sorted(rows), []
    while known:
        group, left = [], size
        while place := bisect_right(known, left):
            length = known[place - 1]
            group.append(rows[length].pop())
            left -= length
            if not rows[length]:
                del known[place - 1]
        found.append(group)
    return found


@torch.no_grad()
def refuse_leaks(
    forward: Callable[[Batch], Any], model: nn.Module, form: Form, example: Batch
) -> None:
    """Raise ConfigError if a row's outputs depend on the row before it in the same sequence.

    Weights that begin with zero would hide it, so they have another value meanwhile.
    """
    local = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    zeros = [one for one in local if not one.any()]
    for weight in zeros:
        weight.fill_(0.01)
    inputs = form.divided(example.inputs)[0] if form.is_whole else example.inputs
    places = inputs[POSITIONS] if isinstance(inputs, Mapping) else inputs[-1]
    half = places.shape[1] // 2
    order = torch.arange(places.shape[1], device=places.device).expand_as(places)
    found = []
    for is_other in (False, True):

        def changed(one: torch.Tensor, is_other: bool = is_other) -> torch.Tensor:
            if one is places:
                return torch.where(order < half, order, order - half)
            other = -one if one.is_floating_point() else one.max() - one
            return torch.cat([(other if is_other else one)[:, :half], one[:, half:]], 1)

        made = tree_map_only(torch.Tensor, changed, inputs)
        found.append(forward(example._replace(inputs=made)))
    for weight in zeros:
        weight.zero_()
    one, two = found
    is_tensor = isinstance(one, torch.Tensor) and one.shape[:2] == places.shape
    if not is_tensor or not (one - two)[:, half:].abs().max() <= CLOSE * one.abs().max():
        raise ConfigError(
            "data.pack: the model lets rows of one sequence see each other; its attention must "
            f"stay within a row, whose {POSITIONS} begin at 0: choose gpt or a causal model of "
            "transformers, or use data.pad instead of data.pack"
        )
