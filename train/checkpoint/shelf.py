"""Where do the checkpoints of a run lie, which are whole, which may go? No torch.

Names on the shelf: `step-00000012` is published; `.saving-00000012-HOST-PID-…` is being written;
`.replaced-…` and `.retired-…` are being removed; `damaged-step-00000012` was refused, set aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.checkpoint import manifest
from train.run import sync

ABANDONED = 3600  # seconds without a change, after which nobody writes there any more


def place(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is published."""
    return directory / f"step-{step:08d}"


def beside(directory: Path, step: int, owner: str) -> Path:
    """Where it is written first; the owner is made by `owner`."""
    return directory / f".saving-{step:08d}-{owner}"


def owner() -> str:
    """Host, process and a random word: who writes, and whether that process still lives."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def published(directory: Path) -> dict[int, Path]:
    """What was published, by step; whether it is still whole is seen when it is read."""
    found = {}
    if directory.is_dir():
        for path in directory.iterdir():
            match = re.fullmatch(r"step-(\d{8,18})", path.name)
            if match:
                found[int(match[1])] = path
    return found


def refused(directory: Path) -> list[Path]:
    """What was set aside, oldest first."""
    return sorted(directory.glob("damaged-step-*"))


def set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of the way by a rename; nothing is deleted.

    Raises:
        OSError: it cannot be renamed; it lies where it was.
    """
    target = path.with_name(f"damaged-{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged-{path.name}.{number}")
    path.rename(target)
    sync(path.parent)
    return target


def publish(written: Path, final: Path) -> None:
    """Give a complete checkpoint its name; another one of the same step is replaced."""
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean(directory: Path) -> None:
    """Remove what was left by attempts that were killed; a living one's is left alone."""
    for path in directory.glob(".*"):
        match = re.fullmatch(r"\.saving-\d+-(.+)-(\d+)-[0-9a-f]{8}", path.name)
        if match and not _abandoned(path, match[1], int(match[2])):
            continue
        match = re.fullmatch(r"\.replaced-(step-\d+)", path.name)
        if match and not (directory / match[1]).exists():
            path.rename(directory / match[1])  # killed between the two renames of publish
            continue
        if path.name.startswith((".saving-", ".replaced-", ".retired-")):
            shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        changed = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # it is being written or removed right now
        return False
    return time.time() - changed > ABANDONED


def stale(steps: Sequence[int], keep: int, forever: int | None, best: int | None) -> list[int]:
    """The steps that may go: not the newest ones, not the multiples, not the best."""
    return [
        step
        for step in sorted(steps)[:-keep]
        if step != best and not (forever and step % forever == 0)
    ]


def retire(path: Path) -> bool:
    """Remove a checkpoint, unless somebody is reading it; returns whether it is gone."""
    try:
        with (path / manifest.NAME).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no manifest, or a file system without locks: nobody can be seen reading
        pass
    with contextlib.suppress(FileNotFoundError):
        retired = path.rename(path.with_name(f".retired-{path.name}"))
        shutil.rmtree(retired, ignore_errors=True)
    return True


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep a checkpoint from being retired, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, manifest.Damaged):
            file = stack.enter_context(
                open(manifest.open_regular(path / manifest.NAME), "rb")  # noqa: PTH123 (a descriptor)
            )
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
