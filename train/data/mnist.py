"""MNIST through torchvision, downloaded once per file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from train.data.source import InMemory, Source
from train.schema import Data
from train.world import World


def mnist(config: Data, world: World) -> Source:
    """60,000 images of 28×28 to train on and 10,000 to validate.

    Raises:
        ConfigError: the files are not there and cannot be downloaded.
    """
    from torchvision.datasets import MNIST  # as slow to import as torch itself

    root = Path(config.root).absolute()
    _provide(root, world)
    splits = []
    for is_train in (True, False):
        data = MNIST(str(root), train=is_train)
        inputs = data.data.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
        splits.append(InMemory(inputs, data.targets))
    train, validation = splits
    return Source(train, validation, len(train), len(validation), shape=(1, 28, 28), classes=10)


def _provide(root: Path, world: World) -> None:
    """Let one rank per file system download what is missing while the others wait."""
    world.raise_together(_download(root) if _is_first_on_file_system(root, world) else "")


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


def _download(root: Path) -> str:
    """Fetch MNIST into `root` unless it is there; return what went wrong, or nothing."""
    from torchvision.datasets import MNIST

    raw = root / "MNIST" / "raw"
    archives = [name for name, _md5 in MNIST.resources]
    if all((raw / Path(name).stem).exists() for name in archives):
        return ""
    try:
        raw.mkdir(parents=True, exist_ok=True)
        # Unpacked beside and moved when whole: a download that was cut off leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as beside:
            fresh = Path(beside) / "MNIST" / "raw"
            fresh.mkdir(parents=True)
            for name in archives:
                if (raw / name).exists():
                    shutil.copy(raw / name, fresh / name)
            MNIST(beside, download=True)
            for name in archives:
                (fresh / Path(name).stem).replace(raw / Path(name).stem)
    except (OSError, RuntimeError) as error:
        return (
            f"data.name=mnist: cannot be downloaded to {root}: {' '.join(str(error).split())}. "
            f"Put {', '.join(archives)} into {raw} by hand (set data.root to use another place), "
            "or take the recipe 'digits', which needs no download"
        )
    return ""
