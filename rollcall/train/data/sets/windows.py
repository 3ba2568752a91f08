"""Windows of equal length in a stream of tokens; the targets are the tokens that follow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rollcall.config.schema import ConfigError
from rollcall.train.data.source import Batch, BatchDataset

Indices = NDArray[np.int64]


@dataclass
class Windows(BatchDataset):
    """Samples of `seq_len` tokens of a stream, which may be memory-mapped."""

    all_count = True  # no target is -100

    _stream: NDArray[Any]  # (n,) unsigned integers
    _seq_len: int
    _classes: int  # the size of the vocabulary; a larger token is an error
    _count: int
    _starts: Callable[[Indices], Indices] | None = None  # None: one window after another

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: list[int]) -> Batch:
        index = np.array(indices)
        starts = self._starts(index) if self._starts else index * self._seq_len
        # Copying whole windows is several times faster than copying single tokens.
        tokens = sliding_window_view(self._stream, self._seq_len + 1)[starts]
        largest = int(tokens.max())
        if largest >= self._classes:
            raise ValueError(
                f"token {largest} is outside the vocabulary of {self._classes} (data.num_classes)"
            )
        both = torch.from_numpy(tokens.astype(np.int64))
        return Batch(both[:, :-1], both[:, 1:], torch.ones(len(indices)))


def consecutive_windows(stream: NDArray[Any], seq_len: int, classes: int, name: str) -> Windows:
    """Cut a whole stream, `name` in messages, into samples; ConfigError if it is too short."""
    count = (len(stream) - 1) // seq_len
    if count < 1:
        needs = f"one sample of data.seq_len={seq_len} needs {seq_len + 1}"
        raise ConfigError(f"{name} has {len(stream)} tokens; {needs}")
    return Windows(stream, seq_len, classes, count)
