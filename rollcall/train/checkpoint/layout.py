"""The directory of a run's checkpoints: names, publishing and removal. No torch.

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

import psutil

from rollcall.system.files import open_regular, sync
from rollcall.train.checkpoint import manifest

ABANDONED = 3600
"""Seconds without a change after which a save that is still being written counts as abandoned."""


def path_of(directory: Path, step: int) -> Path:
    """Return the path of a step's published checkpoint."""
    return directory / f"step-{step:08d}"


def unpublished(directory: Path, step: int, owner: str) -> Path:
    """Return the path to which this `owner` first writes a step's checkpoint."""
    return directory / f".saving-{step:08d}-{owner}"


def owner() -> str:
    """Return the host, the process and a random word, which show if the writer still lives."""
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
    """Rename a damaged checkpoint out of the way; OSError if that is impossible."""
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
    """Remove the files of killed attempts, but none that a live process is writing."""
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
    if host == socket.gethostname() and not psutil.pid_exists(pid):
        return True
    try:
        changed = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # being written or removed right now
        return False
    return time.time() - changed > ABANDONED


def stale(steps: Sequence[int], keep: int, keep_every: int | None, best: int | None) -> list[int]:
    """Return the steps to remove: all but the newest, the multiples of `keep_every`, the best."""
    old = [step for step in sorted(steps)[:-keep] if step != best]
    return [step for step in old if not keep_every or step % keep_every]


def retire(path: Path) -> bool:
    """Remove a checkpoint; return False if somebody is reading it and it stays."""
    try:
        with (path / manifest.NAME).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no manifest, or a file system without locks: readers cannot be seen
        pass
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path.rename(path.with_name(f".retired-{path.name}")), ignore_errors=True)
    return True


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep a checkpoint from being retired while it is read, if the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open_regular(path / manifest.NAME, os.O_NOFOLLOW))
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
