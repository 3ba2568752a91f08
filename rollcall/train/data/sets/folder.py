"""A directory with one directory of images per class, as torchvision's ImageFolder reads it."""

from pathlib import Path

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.sets.images import SUFFIXES, ImageFiles, ImageFormat, image_reader
from rollcall.train.data.source import Source, data_set
from rollcall.train.ranks.world import World

HELD_OUT = 5
"""One image of this many is for validation, if there is no `val/`."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision


def _format(config: Data) -> ImageFormat:
    return ImageFormat(config.image_size, MEAN, STD)


@data_set(augments=True, reader=lambda config, _: image_reader(_format(config)))
def folder(config: Data, _world: World) -> Source:
    """Load data.path/train and data.path/val; without them, every fifth image is for validation."""
    root, form = Path(config.path or ""), _format(config)
    if (root / "train").is_dir():
        names = _classes(root / "train")
        train, validation = _images(root / "train", names), _images(root / "val", names)
    else:
        names = _classes(root)
        images = _images(root, names)
        validation = images[HELD_OUT - 1 :: HELD_OUT]
        train = [image for number, image in enumerate(images, 1) if number % HELD_OUT]
    if not validation:
        raise ConfigError(
            f"data.path={root}: {len(train)} images are too few to keep some for validation; "
            f"expected at least {HELD_OUT}"
        )
    samples, held_out = ImageFiles(train, form, config.augment), ImageFiles(validation, form)
    return Source(samples, held_out, shape=form.shape, names=tuple(names))


def _classes(root: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {root}: {error.strerror}") from None
    if not names:
        raise ConfigError(f"data.path: expected one directory per class in {root}, found none")
    return names


def _images(root: Path, names: list[str]) -> list[tuple[Path, int]]:
    unknown = set(_classes(root)) - set(names)
    if unknown:
        raise ConfigError(f"{root}: class {min(unknown)} is not among the classes of train/")
    images: list[tuple[Path, int]] = []
    for number, name in enumerate(names):
        paths = sorted((root / name).rglob("*"))
        images += [(path, number) for path in paths if path.suffix.lower() in SUFFIXES]
    if not images:
        raise ConfigError(f"{root}: found no images ({', '.join(sorted(SUFFIXES))})")
    return images
