"""Images: as bytes in memory, or as files that are decoded when their turn comes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from train.data.source import Batch, Rows

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
PADDING = 4
"""Pixels by which an image of bytes may be shifted."""


class Form(NamedTuple):
    """What a model expects of an image.

    Attributes:
        edge: pixels on each side.
        mean, std: of each channel, in the scale from 0 to 1; three of them, or one for grey.
    """

    edge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return (len(self.mean), self.edge, self.edge)

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """(…, channels, height, width) bytes to numbers of mean 0 and deviation 1."""
        mean, std = (torch.tensor(part)[:, None, None] for part in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


class Pixels(Rows):
    """Images that lie in memory as bytes: (n, channels, height, width)."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor, form: Form) -> None:
        self._images = images
        self._targets = targets
        self._form = form

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch."""
        index = torch.tensor(rows)
        inputs = self._form.normalise(self._images[index])
        return Batch(inputs, self._targets[index], torch.ones(len(rows)))


class Shifted(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same, each shifted by up to four pixels and mirrored at random."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor, form: Form) -> None:
        self._images = images
        self._targets = targets
        self._form = form

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge, image = self._form.edge, self._images[row]
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        top, left = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
        image = padded[:, top : top + edge, left : left + edge]
        image = image.flip(-1) if random.random() < 0.5 else image
        return self._form.normalise(image), self._targets[row]


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Image files, decoded one by one and brought to one size.

    Args:
        paths: the files.
        targets: class of each.
        form: what comes out.
        augment: take a random piece, of 8 to 100 % of the area, and mirror it at random, as
            Szegedy et al., https://arxiv.org/abs/1409.4842; else the largest square in the middle.
    """

    def __init__(
        self, paths: Sequence[Path], targets: Sequence[int], form: Form, augment: bool = False
    ) -> None:
        self._paths = paths
        self._targets = targets
        self._form = form
        self._augment = augment

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        edge = self._form.edge
        with Image.open(self._paths[row]) as file:
            image = file.convert("L" if len(self._form.mean) == 1 else "RGB")
        box = _piece(*image.size) if self._augment else _middle(*image.size)
        image = image.resize((edge, edge), Image.Resampling.BILINEAR, box)
        if self._augment and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).view(edge, edge, -1).permute(2, 0, 1)
        return self._form.normalise(pixels), self._targets[row]

    def where(self, row: int) -> str:
        """The file of a sample."""
        return str(self._paths[row])

    def raw(self, row: int) -> bytes:
        """What the file holds."""
        return self._paths[row].read_bytes()


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def _piece(width: int, height: int) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = random.uniform(3 / 4, 4 / 3)
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
            return left, top, left + wide, top + high
    return _middle(width, height)
