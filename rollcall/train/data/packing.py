"""Several rows of unequal length in one sequence, with the outputs of each row alone.

A packed sequence holds rows one after another, then padding. Its `position_ids` begin at 0 in each
row and so mark the rows' limits: attention must not cross them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import POSITIONS, Form, SampleError
from rollcall.train.data.source import Batch
from rollcall.train.ranks.device import local_of
from rollcall.train.torch_private import tree_map_only

ROUNDING = 1e-3
"""Relative difference of outputs that rounding may explain."""
AHEAD = 1024
"""Rows of a stream that are packed together."""


def same_row(position_ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of tokens in the same row: (rows, length) to (rows, 1, length, length)."""
    number = (position_ids == 0).cumsum(1)
    return (number[:, :, None] == number[:, None, :]).unsqueeze(1)


class Packed(Dataset[list[Any]]):
    """Sequences of a map-style data set, each a list of rows."""

    def __init__(self, rows: Any, form: Form, name: str) -> None:
        """Group the rows by their lengths: their attribute `lengths`, or all rows are read."""
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
                problem = f"row {row} cannot be packed: {kind}{error}"
                raise ConfigError(f"data.name={name}: {problem}") from error
        self.rows, self._groups = rows, fitted(lengths, int(form.pad))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.rows[row] for row in self._groups[index]]


def fitted(lengths: Iterable[int], size: int) -> list[list[int]]:
    """Return groups of rows that are at most `size` long together: always the longest that fits."""
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(int(length), []).append(row)
    remaining, groups = sorted(rows), []
    while remaining:
        group, space = [], size
        while count := bisect_right(remaining, space):
            length = remaining[count - 1]
            group.append(rows[length].pop())
            space -= length
            if not rows[length]:
                del remaining[count - 1]
        groups.append(group)
    return groups


@torch.no_grad()
def refuse_leaks(
    forward: Callable[[Batch], Any], model: nn.Module, form: Form, example: Batch
) -> None:
    """Raise ConfigError if a row's outputs depend on the row before it in the same sequence."""
    zeros = [weight for weight in map(local_of, model.parameters()) if not weight.any()]
    for weight in zeros:  # which would hide that
        weight.fill_(0.01)
    inputs = form.divided(example.inputs)[0] if form.is_whole else example.inputs
    positions = inputs[POSITIONS] if isinstance(inputs, Mapping) else inputs[-1]
    half = positions.shape[1] // 2
    order = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    two_rows = torch.where(order < half, order, order - half)

    def outputs(is_changed: bool) -> Any:
        """Return the outputs for two rows, the first of which may be changed."""

        def part(leaf: torch.Tensor) -> torch.Tensor:
            if leaf is positions:
                return two_rows
            other = -leaf if leaf.is_floating_point() else leaf.max() - leaf
            return torch.cat([other[:, :half], leaf[:, half:]], 1) if is_changed else leaf

        return forward(example._replace(inputs=tree_map_only(torch.Tensor, part, inputs)))

    before, after = outputs(is_changed=False), outputs(is_changed=True)
    for weight in zeros:
        weight.zero_()
    is_tensor = isinstance(before, torch.Tensor) and before.shape[:2] == positions.shape
    if not is_tensor or not (before - after)[:, half:].abs().max() <= ROUNDING * before.abs().max():
        raise ConfigError(
            "data.pack: the model lets rows of one sequence see each other; its attention must "
            f"stay within a row, whose {POSITIONS} begin at 0: choose gpt or a causal model of "
            "transformers, or use data.pad instead of data.pack"
        )
