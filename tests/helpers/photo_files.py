"""A user's copy of examples/photos: photos of three colours, and its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from checkout import ROOT
from PIL import Image

PHOTOS = ROOT / "examples/photos"
CURVES = re.compile("[wW]riter|tensorboard")
"""Lines for TensorBoard, which not every environment has."""


def draw(folder: Path, counts: Mapping[str, int]) -> None:
    """Draw photos into data/PART/COLOUR, as many of each colour as a part has in `counts`."""
    drawn = np.random.default_rng(0)
    for part, count in counts.items():
        for channel, name in enumerate(("blue", "green", "red")):
            place = folder / "data" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 160, (40, 40, 3), dtype=np.uint8)
                pixels[..., 2 - channel] += 60
                Image.fromarray(pixels).save(place / f"{number}.png")


def files(has_curves: bool) -> dict[str, str]:
    """Return the texts of the example's files by their names, with or without the curves."""
    texts = {path.name: path.read_text() for path in PHOTOS.iterdir() if path.is_file()}
    if has_curves:
        return texts
    lines = {name: text.splitlines(keepends=True) for name, text in texts.items()}
    return {
        name: "".join(line for line in kept if not CURVES.search(line))
        for name, kept in lines.items()
    }
