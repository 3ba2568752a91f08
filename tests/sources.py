"""Data sets of a user's own, for tests."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import numpy as np
import torch
from torch.utils.data import Dataset

from train.data.source import Source
from train.schema import Data
from train.world import World

SIZE = 60


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Images that are different whenever they are read, by all generators that people use."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1, 8, 8) + random.random() + float(np.random.rand())
        return noise + row % 10, row % 10


def noisy(_config: Data, _world: World) -> Source:
    """Also puts this rank and its workers to come into a process group of their own."""
    os.setpgid(0, 0)
    return Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)


class Deadly(Noisy):
    """One sample kills the worker that reads it, as memory that is short would."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if row == 50 and multiprocessing.current_process().name.startswith("ForkProcess"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


def deadly(_config: Data, _world: World) -> Source:
    return Source(Deadly(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)
