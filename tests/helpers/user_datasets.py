"""Data sets such as users write: with random samples, and with one that kills its reader."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import numpy as np
import torch
from torch.utils.data import Dataset

from rollcall.config.schema import Data
from rollcall.train.data.source import Source
from rollcall.train.ranks.world import World

SIZE = 60


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Images with noise from all common random generators, different in every read."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1, 8, 8) + random.random() + float(np.random.rand())
        return noise + row % 10, row % 10


def noisy(_config: Data, _world: World) -> Source:
    """Random images; moves this rank and its future workers to a separate process group."""
    os.setpgid(0, 0)
    return Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)


class Deadly(Noisy):
    """Some samples kill the worker that reads them, like the kernel when memory is short."""

    def __init__(self, *rows: int) -> None:
        self._rows = rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if row in self._rows and multiprocessing.current_process().name.startswith("ForkProcess"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


def deadly(_config: Data, _world: World) -> Source:
    return Source(Deadly(50), Noisy(), SIZE, SIZE, (1, 8, 8), 10)


def deadly_at_the_end(_config: Data, _world: World) -> Source:
    """In the validation, of each half."""
    return Source(Noisy(), Deadly(20, 50), SIZE, SIZE, (1, 8, 8), 10)
