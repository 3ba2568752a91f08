"""A directory of class directories of images, as torchvision's ImageFolder reads it."""

from __future__ import annotations

from pathlib import Path

from train.data.images import SUFFIXES, Files, Form
from train.data.source import Source
from train.schema import ConfigError, Data
from train.world import World

HELD_OUT = 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's models


def folder(config: Data, _world: World) -> Source:
    """Images of data.path/train and data.path/val; without these, every fifth image validates.

    Raises:
        ConfigError: the directories or images are not there.
    """
    if config.path is None:
        raise ConfigError(
            "data.name=folder needs data.path, a directory that holds one directory of images for "
            "each class, or train/ and val/ that do"
        )
    root = Path(config.path)
    if (root / "train").is_dir():
        names = _classes(root / "train")
        train, validation = _images(root / "train", names), _images(root / "val", names)
    else:
        names = _classes(root)
        images = _images(root, names)
        validation = images[HELD_OUT - 1 :: HELD_OUT]
        train = [image for place, image in enumerate(images) if (place + 1) % HELD_OUT]
    if not validation:
        raise ConfigError(f"data.path={root}: {len(train)} images leave none to validate")

    return Source(
        Files(*_columns(train), form(config), config.augment),
        Files(*_columns(validation), form(config)),
        len(train),
        len(validation),
        form(config).shape,
        len(names),
        tuple(names),
    )


def form(config: Data) -> Form:
    """Squares of data.image pixels, in colour."""
    return Form(config.image, MEAN, STD)


def _classes(root: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    except OSError as error:
        raise ConfigError(f"data.path: {root} cannot be read: {error.strerror}") from None
    if not names:
        raise ConfigError(f"data.path: {root} holds no directories, which would be the classes")
    return names


def _images(root: Path, names: list[str]) -> list[tuple[Path, int]]:
    unknown = set(_classes(root)) - set(names)
    if unknown:
        raise ConfigError(f"{root}: class {min(unknown)} is not among the classes of train/")
    found = [
        (path, number)
        for number, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ConfigError(f"{root}: there are no images ({', '.join(sorted(SUFFIXES))})")
    return found


def _columns(images: list[tuple[Path, int]]) -> tuple[list[Path], list[int]]:
    return [path for path, _ in images], [number for _, number in images]
