"""MNIST, FashionMNIST and CIFAR from torchvision, downloaded once per file system."""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.sets.images import ImageFormat, ImagesInMemory, ShiftedImages, image_reader
from rollcall.train.data.source import Source, data_set
from rollcall.train.ranks.world import World

IMAGE_FORMATS = {
    "mnist": ImageFormat(28, (0.1307,), (0.3081,)),
    "fashionmnist": ImageFormat(28, (0.2860,), (0.3530,)),
    "cifar10": ImageFormat(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ImageFormat(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _loader(title: str, augments: bool = False) -> Callable[[Data, World], Source]:
    declare = data_set(
        augments=augments,
        slow_imports=("torchvision.datasets",),  # as slow as torch itself
        reader=lambda config, _: image_reader(IMAGE_FORMATS[config.name]),
    )
    return declare(partial(_source, title))


def _source(title: str, config: Data, world: World) -> Source:
    from torchvision import datasets

    kind: Any = getattr(datasets, title)
    image_format, root = IMAGE_FORMATS[config.name], Path(config.root).absolute()
    # One rank per file system downloads what is missing: rank 0, then the first rank of each node,
    # which finds what rank 0 has downloaded unless that is on another disk.
    for downloads in (world.is_main, world.local_rank == 0):
        world.raise_together(_download(kind, config, root) if downloads else "")
    try:
        train, validation = (kind(str(root), train=is_train) for is_train in (True, False))
    except RuntimeError as error:
        raise ConfigError(f"data.name={config.name}: {root}: {error}; delete it") from None
    images = ShiftedImages if config.augment else ImagesInMemory
    samples = images(*_tensors(train), image_format)
    held_out = ImagesInMemory(*_tensors(validation), image_format)
    return Source(samples, held_out, shape=image_format.shape, names=tuple(train.classes))


def _tensors(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.as_tensor(data.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(data.targets)


def _files(kind: Any, root: Path) -> tuple[Path, list[str], list[str]]:
    """Return the directory that torchvision expects, its archives, and what is unpacked of them."""
    if hasattr(kind, "base_folder"):
        return root, [kind.filename], [kind.base_folder]
    archives = [name for name, _md5 in kind.resources]
    return root / kind.__name__ / "raw", archives, [Path(name).stem for name in archives]


def _download(kind: Any, config: Data, root: Path) -> str:
    """Download a data set into `root` unless it is there; return the problem, or an empty text."""
    directory, archives, unpacked = _files(kind, root)

    def is_complete() -> bool:
        return all((directory / name).exists() for name in unpacked)

    try:
        if is_complete():
            return ""
        directory.mkdir(parents=True, exist_ok=True)
        # Moved here when complete, so an interrupted download leaves no partial file.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            fresh, *_ = _files(kind, Path(temporary))
            fresh.mkdir(parents=True, exist_ok=True)
            for name in archives:
                if (directory / name).exists():
                    shutil.copy(directory / name, fresh / name)
            kind(temporary, download=True)
            for name in unpacked:
                (fresh / name).replace(directory / name)
    except (OSError, RuntimeError) as error:
        if is_complete():  # another run has downloaded it meanwhile
            return ""
        return (
            f"data.name={config.name}: cannot download to {root}: "
            f"{' '.join(str(error).split())}. Copy {', '.join(archives)} to "
            f"{directory} by hand (data.root sets the directory), or use the recipe "
            "'digits', which needs no download"
        )
    return ""


mnist = _loader("MNIST")  # 60,000 training and 10,000 validation images, 28×28 pixels in grey
fashionmnist = _loader("FashionMNIST")  # the same numbers and format
cifar10 = _loader("CIFAR10", augments=True)  # 50,000 and 10,000 images, 32×32 pixels in color
cifar100 = _loader("CIFAR100", augments=True)
