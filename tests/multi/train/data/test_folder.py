"""A directory of images, as several ranks load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ranks import together

from rollcall.config import ConfigError, parse
from rollcall.train.data import sets
from rollcall.train.data.sets.images import ImageFiles
from rollcall.train.ranks.world import World


def _load(rank: int, root: Path) -> None:
    world = World.join("cpu")
    if rank:
        Path.iterdir = Path.rglob = _refuse  # type: ignore[assignment, method-assign]
    config = parse(["data.name=folder", f"data.path={root}", "data.image_size=8"])[1].data
    source = sets.load(config, world)
    assert (source.train_size, source.validation_size, source.names) == (8, 2, ("a", "b"))
    assert source.train[3][1] == 0 and source.train[4][1] == 1
    assert isinstance(source.train, ImageFiles)
    (root.parent / f"seen-{rank}").write_text(source.train.where(4))
    with pytest.raises(ConfigError, match=r"cannot read .*empty"):
        sets.load(config.model_copy(update={"path": f"{root}/empty"}), world)
    world.leave()


def _refuse(*_: Any) -> Any:
    raise AssertionError("only rank 0 lists files")


def test_one_rank_lists_the_files_for_all(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (10, 10)).save(root / name / f"{number}.png")
    together(2, _load, root)
    seen = [(tmp_path / f"seen-{rank}").read_text() for rank in range(2)]
    assert seen == [str(root / "b" / "0.png")] * 2
