"""Several rows of unequal length in one sequence, which compute the same as each row alone.

A packed sequence holds rows behind each other, then padding. Its `position_ids` begin at 0 in each
row, so they also say which tokens belong together: attention must not cross into another row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset

from rollcall.config.schema import ConfigError
from rollcall.train.data.form import POSITIONS, Form
from rollcall.train.data.source import Batch, BatchDataset
from rollcall.train.dist.world import World

CLOSE = 1e-3
"""Relative difference of outputs that rounding may explain, also in bf16 or with other kernels."""


def same_row(position_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens are of the same row: (rows, length) to (rows, 1, length, length)."""
    number = (position_ids == 0).cumsum(1)
    return (number[:, :, None] == number[:, None, :]).unsqueeze(1)


def packed(samples: Any, form: Form, world: World, name: str) -> Any:
    """Return a data set whose samples are lists of rows that fit into `form.pack` tokens.

    Rows of a map-style data set are put together once, the longest first, each where the least
    space is left. Their lengths are its attribute `lengths`, or every rank reads a share of the
    rows. Rows of an iterable stay in order. Every rank must call this together.

    Raises:
        ConfigError: a row cannot be read.
    """
    if isinstance(samples, BatchDataset):
        raise ConfigError(f"data.pack: the rows of data.name={name} have one length; remove it")
    is_map = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not is_map or isinstance(samples, IterableDataset):
        return _InOrder(samples, form) if isinstance(samples, Iterable) else samples
    known = getattr(samples, "lengths", None)
    if known is None:
        known = _lengths(samples, form, world, name)
    return _Groups(samples, fitted(np.asarray(known), form.pack))


def _lengths(samples: Any, form: Form, world: World, name: str) -> Any:
    mine, problem = [], ""
    for row in range(world.rank, len(samples), world.world_size):
        try:
            mine.append(form.length(samples[row]))
        except Exception as error:  # a data set may raise anything
            problem = f"data.pack: cannot read row {row} of data.name={name}: {error}"
            break
    world.raise_together(problem)
    share = torch.zeros(-(-len(samples) // world.world_size), dtype=torch.int64)
    share[: len(mine)] = torch.tensor(mine)
    return world.gather(share).T.flatten()[: len(samples)]


def fitted(lengths: Any, size: int) -> list[list[int]]:
    """Return groups of row numbers whose lengths sum to at most `size`: best fit, longest first."""
    begun: dict[int, list[list[int]]] = {}  # groups by the space that is left
    spaces: list[int] = []  # the keys, in order
    found: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space = max(size, length)
            found.append(group := [])
        else:
            space = spaces[place]
            group = begun[space].pop()
            if not begun[space]:
                del begun[space], spaces[place]
        group.append(row)
        if left := space - length:
            if left not in begun:
                insort(spaces, left)
            begun.setdefault(left, []).append(group)
    return found


class _Groups(Dataset[list[Any]]):
    """Lists of rows of a map-style data set."""

    def __init__(self, rows: Any, groups: list[list[int]]) -> None:
        self._rows, self._groups = rows, groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._rows[row] for row in self._groups[index]]

    def where(self, index: int) -> str:
        """Return the numbers of the rows, for messages."""
        return f"rows {', '.join(map(str, self._groups[index]))}"


class _InOrder:
    """Lists of rows of an iterable; each ends where the next row does not fit."""

    def __init__(self, rows: Any, form: Form) -> None:
        self.ex_iterable = rows  # by this name `Stream` looks for buffers in it
        self._form = form
        self._state: Any = None  # of the rows, behind the newest list
        if hasattr(rows, "set_epoch"):
            self.set_epoch = rows.set_epoch
        self._is_saved = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")
        if self._is_saved:
            self.state_dict, self.load_state_dict = self._saved, self._load

    def __iter__(self) -> Iterator[list[Any]]:
        group: list[Any] = []
        left, state = self._form.pack, None
        for row in self.ex_iterable:
            length = self._form.length(row)
            if group and length > left:
                self._state = state  # the row that did not fit is read again
                yield group
                group, left = [], self._form.pack
            group.append(row)
            left -= length
            state = self.ex_iterable.state_dict() if self._is_saved else None
        if group:
            self._state = state
            yield group

    def _saved(self) -> Any:
        return self.ex_iterable.state_dict() if self._state is None else self._state

    def _load(self, state: Any) -> None:
        self._state = None
        self.ex_iterable.load_state_dict(state)


def refuse_leaks(forward: Callable[[Batch], Any], form: Form, example: Batch) -> None:
    """Compare the outputs of a second row after other first rows.

    Raises:
        ConfigError: they differ, so the model lets rows of one sequence see each other.
    """
    inputs = form.divided(example.inputs)[0] if form.is_whole else example.inputs
    places = inputs[POSITIONS] if isinstance(inputs, Mapping) else inputs[-1]
    half = places.shape[1] // 2
    halves = torch.cat([torch.arange(half), torch.arange(places.shape[1] - half)]).to(places)

    def made(whole: torch.Tensor, is_other: bool) -> torch.Tensor:
        if whole is places:
            return halves.expand_as(places)
        first = -whole if whole.is_floating_point() else whole.max() - whole
        return torch.cat([(first if is_other else whole)[:, :half], whole[:, half:]], 1)

    one, two = (
        forward(
            example._replace(
                inputs=tree_map_only(torch.Tensor, partial(made, is_other=other), inputs)
            )
        )
        for other in (False, True)
    )
    is_tensor = isinstance(one, torch.Tensor) and one.shape[:2] == places.shape
    if not is_tensor or not (one - two)[:, half:].abs().max() <= CLOSE * one.abs().max():
        raise ConfigError(
            "data.pack: the model lets rows of one sequence see each other; its attention must "
            f"stay within a row, whose {POSITIONS} begin at 0: choose gpt or a causal model of "
            "transformers, or use data.pad instead of data.pack"
        )
