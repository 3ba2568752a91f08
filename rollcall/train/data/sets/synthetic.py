"""Synthetic data for benchmarks: any number of samples in the memory of two."""

import numpy as np
import torch

from rollcall.config.schema import Data
from rollcall.train.data.sets.windows import Windows
from rollcall.train.data.source import Batch, BatchDataset, Source
from rollcall.train.ranks.world import World

HELD_OUT = 10
"""There is one validation sample for this many training samples."""
MULTIPLIER = 2_654_435_761  # of Knuth's multiplicative hash, which spreads the samples' indices


def synthetic_images(config: Data, _world: World) -> Source:
    """Return noise of shape (3, image_size, image_size), a little brighter from class to class."""
    classes, shape = config.num_classes or 10, (3, config.image_size, config.image_size)
    held_out = max(1, config.num_samples // HELD_OUT)
    train = Noise(config.num_samples, shape, classes, first=0)
    validation = Noise(held_out, shape, classes, first=config.num_samples)
    return Source(train, validation, shape=shape, classes=classes)


def synthetic_tokens(config: Data, _world: World) -> Source:
    """Return windows of one short random stream of tokens, which a model can memorize."""
    classes = config.num_classes or 256
    held_out = max(1, config.num_samples // HELD_OUT)
    stream = np.random.default_rng(0).integers(classes, size=4 * config.seq_len, dtype=np.uint32)
    starts = len(stream) - config.seq_len
    train, validation = (
        Windows(stream, config.seq_len, classes, count, lambda index: index * MULTIPLIER % starts)
        for count in (config.num_samples, held_out)
    )
    shape = (config.seq_len,)
    return Source(train, validation, shape=shape, classes=classes, is_shifted=True)


class Noise(BatchDataset):
    """Pieces of one strip of noise; the index of a sample determines where its piece begins."""

    all_count = True  # no target is -100

    def __init__(self, count: int, shape: tuple[int, ...], classes: int, first: int) -> None:
        self._count, self._first = count, first
        self._shape, self._classes = shape, classes
        self._pixels = int(np.prod(shape))
        self._strip = torch.randn(2 * self._pixels, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: list[int]) -> Batch:
        hashes = [(self._first + index) * MULTIPLIER % 2**32 for index in indices]
        targets = torch.tensor([number % self._classes for number in hashes])
        starts = [number // self._classes % self._pixels for number in hashes]
        pieces = [self._strip[start : start + self._pixels] for start in starts]
        inputs = torch.stack(pieces) + (targets / self._classes).unsqueeze(1)
        return Batch(inputs.view(-1, *self._shape), targets, torch.ones(len(indices)))
