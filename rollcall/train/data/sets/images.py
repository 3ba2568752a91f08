"""Images: as bytes in memory, or as files that are decoded when they are needed."""

import copy
import math
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from rollcall.train.data.source import Batch, BatchDataset, ReadFiles

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
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
        images = images.float().div_(255)
        for channel, mean, std in zip(images.unbind(-3), self.mean, self.std, strict=True):
            channel.sub_(mean).div_(std)
        return images


class _Bytes(ImageFormat):
    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        return images


class _Normalized:
    _format: ImageFormat

    def as_bytes(self) -> tuple[Any, Callable[[Batch], Batch]]:
        """Return samples with bytes, a quarter of the size, and what normalizes a batch of them."""
        images, form = copy.copy(self), self._format
        images._format = _Bytes(*form)
        return images, lambda batch: batch._replace(inputs=form.normalize(batch.inputs))


@dataclass
class _Images(_Normalized, Dataset[Any]):
    """Images in memory, as bytes (n, channels, height, width)."""

    all_count = True  # no target is -100

    _images: torch.Tensor
    _targets: torch.Tensor
    _format: ImageFormat

    def __len__(self) -> int:
        return len(self._targets)


class ImagesInMemory(_Images, BatchDataset):
    """Images in memory, unchanged."""

    def __getitems__(self, indices: list[int]) -> Batch:
        index = torch.tensor(indices)
        inputs = self._format.normalize(self._images[index])
        return Batch(inputs, self._targets[index], torch.ones(len(indices)))


class ShiftedImages(_Images):
    """Images in memory, each shifted by up to four pixels and mirrored at random."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge, image = self._format.edge, self._images[index]
        padded = torch.nn.functional.pad(image, [PADDING] * 4)
        top, left = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
        image = padded[:, top : top + edge, left : left + edge]
        image = image.flip(-1) if random.random() < 0.5 else image
        return self._format.normalize(image), self._targets[index]


class ImageFiles(_Normalized, Dataset[tuple[torch.Tensor, int]]):
    """Image files, decoded one by one and resized to one format.

    With `augment`, an image is a random crop of 8 to 100 % of the area, mirrored at random
    (Szegedy et al., https://arxiv.org/abs/1409.4842); without, the largest centered square.
    """

    all_count = True  # no target is -100

    def __init__(
        self, images: Iterable[tuple[str | Path, int]], form: ImageFormat, augment: bool = False
    ) -> None:
        paths, targets = zip(*images, strict=True)
        # Arrays, since counting references to objects would copy the memory that workers share.
        self._paths = np.array([os.fsencode(path) for path in paths])
        self._targets = np.array(targets)
        self._format, self._augment = form, augment

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        edge = self._format.edge
        with Image.open(self.where(index)) as file:
            size, wanted = file.size, "L" if len(self._format.mean) == 1 else "RGB"
            left, top, right, bottom = (_random_crop if self._augment else _center_crop)(*size)
            scale = edge / min(right - left, bottom - top)
            # A JPEG is decoded at a half, a quarter or an eighth if the crop stays large enough.
            wide, high = math.ceil(size[0] * scale), math.ceil(size[1] * scale)
            drafted = file.draft(wanted, (wide, high))  # and the size of the original then
            image = file.convert(wanted)
        x, y = (drafted[1][2] / size[0], drafted[1][3] / size[1]) if drafted else (1.0, 1.0)
        box = left * x, top * y, right * x, bottom * y
        image = image.resize((edge, edge), Image.Resampling.BILINEAR, box)
        if self._augment and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).view(edge, edge, -1).permute(2, 0, 1)
        return self._format.normalize(pixels), int(self._targets[index])

    def where(self, index: int) -> str:
        """Return the file of a sample."""
        return os.fsdecode(self._paths[index])

    def raw(self, index: int) -> bytes:
        """Return the content of the file."""
        return Path(self.where(index)).read_bytes()


def image_reader(image_format: ImageFormat) -> ReadFiles:
    """Return a function that makes a data set of image files, for predictions."""
    return lambda paths: ImageFiles([(path, 0) for path in paths], image_format)


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
