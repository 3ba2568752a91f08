"""Small file systems that a test can fill, freeze or make read-only. They need root."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounts file systems: sudo -E ./env/run pytest tests/multi"
)


@contextmanager
def hanging(place: Path) -> Iterator[None]:
    """Mount a file system in which every access hangs, as when a file server is gone."""
    place.mkdir(parents=True)
    server = os.open("/dev/fuse", os.O_RDWR)  # whose requests nobody answers
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        command = ["mount", "-i", "-t", "fuse", "-o", options, "none", str(place)]
        subprocess.run(command, pass_fds=[server], check=True)
        yield
    finally:
        os.close(server)
        run("umount", "--lazy", place)  # a thread may still be in it


@contextmanager
def mounted(place: Path, kind: str, size: str) -> Iterator[Path]:
    """Mount a file system of this type and size in a directory while the context is open."""
    place.mkdir(parents=True, exist_ok=True)
    if kind == "tmpfs":
        run("mount", "-t", kind, "-o", f"size={size},mode=0700", "none", place)
    else:
        image = place.with_name(f"{place.name}.image")
        run("truncate", f"--size={size}", image)
        run(f"mkfs.{kind}", "-q", image)
        run("mount", "-o", "loop", image, place)
        place.chmod(0o700)
    try:
        yield place
    finally:
        until(lambda: not subprocess.run(["umount", place], stderr=subprocess.DEVNULL).returncode)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Block all writes to a file system, like a file server that does not answer."""
    run("fsfreeze", "--freeze", place)
    try:
        yield
    finally:
        run("fsfreeze", "--unfreeze", place)


def run(*words: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition is true; fail after a number of seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
