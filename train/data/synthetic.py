"""Made-up data for benchmarks: any number of samples from the memory of two."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.source import Batch, Rows, Source
from train.data.windows import Windows
from train.schema import Data
from train.world import World

VALIDATION = 10
"""One validation sample for so many training samples."""
PRIME = 2_654_435_761  # Knuth's multiplicative hash spreads the numbers of the samples


def synthetic_images(config: Data, _world: World) -> Source:
    """Noise of 3 × image × image, a little brighter from class to class, so that a model learns."""
    classes, shape = config.classes or 10, (3, config.image, config.image)
    held_out = max(1, config.samples // VALIDATION)
    return Source(
        train=Noise(config.samples, shape, classes, first=0),
        validation=Noise(held_out, shape, classes, first=config.samples),
        train_size=config.samples,
        validation_size=held_out,
        shape=shape,
        classes=classes,
    )


def synthetic_tokens(config: Data, _world: World) -> Source:
    """Pieces of one short random stream of tokens, which a model can learn by heart."""
    classes = config.classes or 256
    held_out = max(1, config.samples // VALIDATION)
    stream = np.random.default_rng(0).integers(classes, size=4 * config.context, dtype=np.uint32)
    places = len(stream) - config.context

    def starts(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers * PRIME % places

    train, validation = (
        Windows(stream, config.context, classes, count, starts)
        for count in (config.samples, held_out)
    )
    return Source(train, validation, len(train), len(validation), (config.context,), classes)


class Noise(Rows):
    """Pieces of one strip of noise: the number of a sample says where its piece begins."""

    def __init__(self, count: int, shape: tuple[int, ...], classes: int, first: int) -> None:
        self._count = count
        self._shape = shape
        self._classes = classes
        self._first = first
        self._pixels = int(np.prod(shape))
        self._strip = torch.randn(2 * self._pixels, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch."""
        hashes = [(self._first + row) * PRIME % 2**32 for row in rows]
        targets = torch.tensor([number % self._classes for number in hashes])
        starts = [number // self._classes % self._pixels for number in hashes]
        pieces = [self._strip[start : start + self._pixels] for start in starts]
        inputs = torch.stack(pieces) + (targets / self._classes).unsqueeze(1)
        return Batch(inputs.view(-1, *self._shape), targets, torch.ones(len(rows)))
