"""A directory with one directory of images per class, as torchvision's ImageFolder reads it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollcall.config.schema import ConfigError, Data
from rollcall.messages.refusal import refusing
from rollcall.train.data.sets.images import SUFFIXES, ImageFiles, ImageFormat, image_reader
from rollcall.train.data.source import Source, data_set
from rollcall.train.ranks.world import World

HELD_OUT = 5
"""One image of this many is for validation, if there is no `val/`."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision
Image = tuple[str, int]
"""A file, and the number of its class."""


def _format(config: Data) -> ImageFormat:
    return ImageFormat(config.image_size, MEAN, STD)


@data_set(augments=True, reader=lambda config, _: image_reader(_format(config)))
def folder(config: Data, world: World) -> Source:
    """Load data.path/train and data.path/val; without them, every fifth image is for validation."""
    root, form = Path(config.path or ""), _format(config)
    listed = None
    with world.together():  # one rank, since to list a million files is a load for a file system
        listed = _listed(root) if world.is_main else None
    names, *parts = world.broadcast(listed)
    train, *held_out = ([*_images(root, names, part)] for part in parts)
    [validation] = held_out or [train[HELD_OUT - 1 :: HELD_OUT]]
    if not held_out:
        train = [image for number, image in enumerate(train, 1) if number % HELD_OUT]
    if not validation:
        raise ConfigError(
            f"data.path={root}: {len(train)} images are too few to keep some for validation; "
            f"expected at least {HELD_OUT}"
        )
    samples, validating = ImageFiles(train, form, config.augment), ImageFiles(validation, form)
    return Source(samples, validating, shape=form.shape, names=tuple(names))


def _images(root: Path, names: list[str], part: dict[str, list[list[str]]]) -> Iterator[Image]:
    for folder, files in part.items():
        for number, (name, of_class) in enumerate(zip(names, files, strict=True)):
            base = os.path.join(root, folder, name, "")  # noqa: PTH118  # a path for each is slow
            yield from ((base + file, number) for file in of_class)


def _listed(root: Path) -> list[Any]:
    parts = ("train", "val") if (root / "train").is_dir() else ("",)
    names = _classes(root / parts[0])
    return [names, *({part: _files(root / part, names)} for part in parts)]


def _classes(root: Path) -> list[str]:
    with refusing(f"data.path: cannot read {root}"):
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    if not names:
        raise ConfigError(f"data.path: expected one directory per class in {root}, found none")
    return names


def _files(root: Path, names: list[str]) -> list[list[str]]:
    if unknown := set(_classes(root)) - set(names):
        raise ConfigError(f"{root}: class {min(unknown)} is not among the classes of train/")
    files = []
    for folder in (root / name for name in names):
        with refusing(f"data.path: cannot read {folder}"):
            paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        files.append([str(path.relative_to(folder)) for path in paths])
    if not any(files):
        raise ConfigError(f"{root}: found no images ({', '.join(sorted(SUFFIXES))})")
    return files
