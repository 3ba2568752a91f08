"""Images: as bytes in memory, or as files that are decoded when they are needed."""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from rollcall.train.data.source import Batch, BatchDataset, ReadFiles

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
PADDING = 4
"""The largest shift of an augmented image, in pixels."""


class ImageFormat(NamedTuple):
    """The size and normalization of the images that a model gets."""

    edge: int  # height and width in pixels
    mean: tuple[float, ...]  # of each channel, for values from 0 to 1
    std: tuple[float, ...]  # likewise

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width)."""
        return (len(self.mean), self.edge, self.edge)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Map bytes (…, channels, height, width) to floats of mean 0 and deviation 1."""
        mean, std = (torch.tensor(part)[:, None, None] for part in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


@dataclass
class ImagesInMemory(BatchDataset):
    """Images in memory, as bytes (n, channels, height, width)."""

    _images: torch.Tensor
    _targets: torch.Tensor
    _format: ImageFormat

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, indices: list[int]) -> Batch:
        index = torch.tensor(indices)
        inputs = self._format.normalize(self._images[index])
        return Batch(inputs, self._targets[index], torch.ones(len(indices)))


@dataclass
class ShiftedImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images in memory, each shifted by up to four pixels and mirrored at random."""

    _images: torch.Tensor
    _targets: torch.Tensor
    _format: ImageFormat

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge, image = self._format.edge, self._images[index]
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        top, left = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
        image = padded[:, top : top + edge, left : left + edge]
        image = image.flip(-1) if random.random() < 0.5 else image
        return self._format.normalize(image), self._targets[index]


class Paths:
    """Paths in one array, which workers share; they would copy a list whose members they count."""

    def __init__(self, paths: Iterable[Path]) -> None:
        names = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Path:
        place = range(len(self))[index]
        start = self._ends[place - 1] if place else 0
        return Path(os.fsdecode(self._bytes[start : self._ends[place]].tobytes()))


@dataclass
class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Image files, decoded one by one and resized to one format.

    An augmented image is a random crop of 8 to 100 % of the area, mirrored at random (Szegedy et
    al., https://arxiv.org/abs/1409.4842), any other the largest centered square.
    """

    _paths: Sequence[Path] | Paths
    _targets: Sequence[int] | NDArray[np.int64]
    _format: ImageFormat
    _augment: bool = False

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        edge = self._format.edge
        with Image.open(self._paths[index]) as file:
            image = file.convert("L" if len(self._format.mean) == 1 else "RGB")
        box = _random_crop(*image.size) if self._augment else _center_crop(*image.size)
        image = image.resize((edge, edge), Image.Resampling.BILINEAR, box)
        if self._augment and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).view(edge, edge, -1).permute(2, 0, 1)
        return self._format.normalize(pixels), int(self._targets[index])

    def where(self, index: int) -> str:
        """Return the file of a sample."""
        return str(self._paths[index])

    def raw(self, index: int) -> bytes:
        """Return the content of the file."""
        return self._paths[index].read_bytes()


def image_reader(image_format: ImageFormat) -> ReadFiles:
    """Return what makes a data set of image files, for predictions."""
    return lambda paths: ImageFiles(paths, [0] * len(paths), image_format)


def _center_crop(width: int, height: int) -> tuple[float, float, float, float]:
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def _random_crop(width: int, height: int) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = random.uniform(3 / 4, 4 / 3)
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
            return left, top, left + wide, top + high
    return _center_crop(width, height)
