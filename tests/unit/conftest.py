"""One process that is a whole world, and checkpoints of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World

# Imported below where they are needed: most tests here need no torch.


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process alone."""
    from rollcall.train.ranks.world import World

    world = World.join("cpu")
    yield world
    world.leave()


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, which are not to be changed."""
    from checkpoints import save, state

    from rollcall.train.checkpoint import write_plan
    from rollcall.train.checkpoint.engine import Engine
    from rollcall.train.checkpoint.store import CheckpointStore

    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Engine(CheckpointStore(directory, world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "CHUNK_BYTES", 2**17)  # so that a tensor has several
        for step in (1, 2):
            save(checkpoints, step, state(step), samples=64 * step)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))
