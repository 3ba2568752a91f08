"""Equally long pieces of a stream of tokens, each with the tokens that follow as targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.source import Batch, Rows
from train.schema import ConfigError

Numbers = NDArray[np.int64]


class Windows(Rows):
    """Samples of `context` tokens of a stream, which may lie on disk.

    Args:
        stream: (n,) unsigned integers.
        context: tokens of a sample.
        classes: one more than the largest token that may stand there.
        count: how many samples there are.
        starts: where the samples of these numbers begin (default: one after the other).
    """

    def __init__(
        self,
        stream: NDArray[Any],
        context: int,
        classes: int,
        count: int,
        starts: Callable[[Numbers], Numbers] | None = None,
    ) -> None:
        self._stream = stream
        self._context = context
        self._classes = classes
        self._count = count
        self._starts = starts or (lambda numbers: numbers * context)

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch.

        Raises:
            ValueError: a token is larger than the model knows.
        """
        places = self._starts(np.array(rows))[:, None] + np.arange(self._context + 1)
        tokens = torch.from_numpy(self._stream[places].astype(np.int64))
        largest = int(tokens.max())
        if largest >= self._classes:
            raise ValueError(
                f"it has token {largest}, but there are {self._classes} (data.classes)"
            )
        return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(rows)))


def all_of(stream: NDArray[Any], context: int, classes: int, name: str) -> Windows:
    """The samples of a whole stream.

    Args:
        name: of the stream, for the message.

    Raises:
        ConfigError: there is none.
    """
    count = (len(stream) - 1) // context
    if count < 1:
        raise ConfigError(
            f"{name} holds {len(stream)} tokens, which is less than one sample of "
            f"data.context={context} and the token after it"
        )
    return Windows(stream, context, classes, count)
