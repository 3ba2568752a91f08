"""Where are a run's checkpoints, and which may be removed? No torch.

`step-00000012` is published; `.saving-00000012-HOST-PID-…` is being written; `.replaced-…` and
`.retired-…` are being removed; `damaged-step-00000012` failed its checks and was set aside.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcall.records.files import sync
from rollcall.train.checkpoint import manifest
from rollcall.train.checkpoint.contents import Damaged

ABANDONED = 3600
"""Seconds without a change after which a save that is still being written counts as abandoned."""


def place(directory: Path, step: int) -> Path:
    """Return the path of a step's published checkpoint."""
    return directory / f"step-{step:08d}"


def unpublished(directory: Path, step: int, owner: str) -> Path:
    """Return the path where this `owner` first writes a step's checkpoint."""
    return directory / f".saving-{step:08d}-{owner}"


def owner() -> str:
    """Return this host, this process and a random word: enough to see if the writer still lives."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def published(directory: Path) -> dict[int, Path]:
    """Return the published checkpoints by step; only reading one shows whether it is damaged."""
    paths = directory.iterdir() if directory.is_dir() else ()
    names = [(path, re.fullmatch(r"step-(\d{8,18})", path.name)) for path in paths]
    return {int(match[1]): path for path, match in names if match}


def refused(directory: Path) -> list[Path]:
    """Return the damaged checkpoints that were set aside, oldest first."""
    return sorted(directory.glob("damaged-step-*"))


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint out of the way; OSError if it has to stay where it is."""
    target, number = path.with_name(f"damaged-{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged-{path.name}.{number}")
    path.rename(target)
    sync(path.parent)


def publish(written: Path, final: Path) -> None:
    """Give a complete checkpoint its final name; replace an earlier one of the same step."""
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean(directory: Path) -> None:
    """Remove what killed attempts left behind; leave alone what a live process is writing."""
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
    except OSError:  # being written or removed right now
        return False
    return time.time() - changed > ABANDONED


def stale(steps: Sequence[int], keep: int, keep_every: int | None, best: int | None) -> list[int]:
    """Return the steps to remove: all but the newest, the multiples of `keep_every`, the best."""
    return [
        step
        for step in sorted(steps)[:-keep]
        if step != best and not (keep_every and step % keep_every == 0)
    ]


def retire(path: Path) -> bool:
    """Remove a checkpoint unless somebody is reading it; return whether it was removed."""
    try:
        with (path / manifest.NAME).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no manifest, or a file system without locks: readers cannot be seen
        pass
    with contextlib.suppress(FileNotFoundError):
        retired = path.rename(path.with_name(f".retired-{path.name}"))
        shutil.rmtree(retired, ignore_errors=True)
    return True


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep a checkpoint from being retired while it is read, if the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, Damaged):
            file = manifest.open_regular(path / manifest.NAME)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
