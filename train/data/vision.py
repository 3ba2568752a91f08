"""MNIST, FashionMNIST and CIFAR through torchvision, downloaded once per file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from train.data.images import Form, Pixels, Shifted
from train.data.source import Source
from train.schema import ConfigError, Data
from train.world import World

FORMS = {
    "mnist": Form(28, (0.1307,), (0.3081,)),
    "fashionmnist": Form(28, (0.2860,), (0.3530,)),
    "cifar10": Form(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Form(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def mnist(config: Data, world: World) -> Source:
    """60,000 digits of 28×28 in grey to train on and 10,000 to validate."""
    return _source("MNIST", config, world)


def fashionmnist(config: Data, world: World) -> Source:
    """As many clothes, in the same form."""
    return _source("FashionMNIST", config, world)


def cifar10(config: Data, world: World) -> Source:
    """50,000 images of 32×32 in colour to train on and 10,000 to validate."""
    return _source("CIFAR10", config, world)


def cifar100(config: Data, world: World) -> Source:
    """The same with 100 classes."""
    return _source("CIFAR100", config, world)


def _source(title: str, config: Data, world: World) -> Source:
    """Both splits, in memory.

    Raises:
        ConfigError: the files are not there and cannot be downloaded, or are damaged.
    """
    from torchvision import datasets  # as slow to import as torch itself

    kind: Any = getattr(datasets, title)
    form, root = FORMS[config.name], Path(config.root).absolute()
    # One rank per file system downloads what is missing while the others wait.
    world.raise_together(
        _download(kind, config, root) if _is_first_on_file_system(root, world) else ""
    )
    try:
        train, validation = (kind(str(root), train=is_train) for is_train in (True, False))
    except RuntimeError as error:
        raise ConfigError(f"data.name={config.name}: {root}: {error}; remove it") from None
    images = Shifted if config.augment else Pixels

    return Source(
        images(*_tensors(train), form),
        Pixels(*_tensors(validation), form),
        len(train),
        len(validation),
        form.shape,
        len(train.classes),
        tuple(train.classes),
    )


def _tensors(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.as_tensor(data.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(data.targets)


class _Place(NamedTuple):
    """Where torchvision looks for a data set: the directory, archives, and what they unpack to."""

    directory: Path
    archives: list[str]
    unpacked: list[str]


def _place(kind: Any, root: Path) -> _Place:
    if hasattr(kind, "base_folder"):
        return _Place(root, [kind.filename], [kind.base_folder])
    archives = [name for name, _md5 in kind.resources]
    return _Place(root / kind.__name__ / "raw", archives, [Path(name).stem for name in archives])


def _is_there(place: _Place) -> bool:
    return all((place.directory / name).exists() for name in place.unpacked)


def _is_first_on_file_system(root: Path, world: World) -> bool:
    """Rank 0 leaves a mark; a node that sees it shares rank 0's disk and leaves the work to it."""
    mark = root / world.broadcast_text(f".mark-{os.getpid()}-{os.urandom(4).hex()}")
    made = True
    if world.is_main:
        try:
            root.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError:
            made = False  # _download meets the same error and explains it
    world.barrier()
    shared = mark.exists()
    world.barrier()
    if world.is_main and made:
        mark.unlink()
    return world.is_main or (world.local_rank == 0 and not shared)


def _download(kind: Any, config: Data, root: Path) -> str:
    """Fetch a data set into `root` unless it is there; return what went wrong, or nothing."""
    place = _place(kind, root)
    if _is_there(place):
        return ""
    try:
        place.directory.mkdir(parents=True, exist_ok=True)
        # Unpacked beside and moved when whole: a download that was cut off leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as beside:
            fresh = _place(kind, Path(beside)).directory
            fresh.mkdir(parents=True, exist_ok=True)
            for name in place.archives:
                if (place.directory / name).exists():
                    shutil.copy(place.directory / name, fresh / name)
            kind(beside, download=True)
            for name in place.unpacked:
                (fresh / name).replace(place.directory / name)
    except (OSError, RuntimeError) as error:
        if _is_there(place):  # another run was faster
            return ""
        return (
            f"data.name={config.name}: cannot be downloaded to {root}: "
            f"{' '.join(str(error).split())}. Put {', '.join(place.archives)} into "
            f"{place.directory} by hand (set data.root to use another place), "
            "or take the recipe 'digits', which needs no download"
        )
    return ""
