"""How a user's files become samples of the kind that a model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from train.data.digits import FORM
from train.data.folder import form
from train.data.images import Files, Form
from train.data.source import Batch, Rows, Source
from train.data.text import BYTES, join
from train.data.tokens import mapped
from train.data.vision import FORMS
from train.data.windows import Windows, all_of
from train.schema import Data

Read = Callable[[Sequence[Path]], Dataset[Any]]


def reader(config: Data, classes: int) -> Read | None:
    """What reads files as the data of this name does; None where that means nothing.

    Args:
        classes: as in a Source.
    """
    forms = {"digits": FORM, "folder": form(config), **FORMS}
    if config.name in forms:
        return partial(_images, forms[config.name])
    if config.name == "text":
        return partial(_texts, config.context)
    if config.name == "tokens":
        return partial(_tokens, config.context, classes)
    return None


def blank(config: Data, facts: Mapping[str, Any]) -> Source | None:
    """A source that has nothing but its kind, for models that read files; None if there is none.

    Args:
        facts: its identity, as a run recorded it.
    """
    shape, classes = tuple(facts["shape"]), facts["classes"]
    read = reader(config, classes)
    nothing = _Nothing(shape)
    names = tuple(facts["names"])
    return read and Source(nothing, nothing, 2, 2, shape, classes, names, read)


class _Nothing(Rows):
    """Samples of zeros, from which a strategy learns the shapes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return 2

    def __getitems__(self, rows: list[int]) -> Batch:
        size, weights = (len(rows), *self._shape), torch.ones(len(rows))
        if len(self._shape) == 1:
            zeros = torch.zeros(size, dtype=torch.int64)
            return Batch(zeros, zeros, weights)
        return Batch(torch.zeros(size), torch.zeros(len(rows), dtype=torch.int64), weights)


def _images(form: Form, paths: Sequence[Path]) -> Files:
    return Files(paths, [0] * len(paths), form)


def _texts(context: int, paths: Sequence[Path]) -> Windows:
    return all_of(join(paths), context, BYTES, "the input")


def _tokens(context: int, classes: int, paths: Sequence[Path]) -> Windows:
    stream = np.concatenate([mapped(path) for path in paths])
    return all_of(stream, context, classes, "the input")
