"""Disks and file systems that a run uses."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rollcall.launch.doctor.check import Found, Node, judge, ok, warn
from rollcall.text import size

SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.sshfs", "pvfs2")
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
MOUNTS = "/proc/self/mounts"


def free_space(node: Node) -> Found:
    return _left(node, lambda it: (it.f_bavail * it.f_frsize, it.f_blocks * it.f_frsize), size, 1e9)


def free_inodes(node: Node) -> Found:
    return _left(node, lambda it: (it.f_favail, it.f_files), "{:,.0f} inodes".format, 1e4)


def file_system(node: Node) -> Found:
    types = _mounts(node.read(MOUNTS))
    found = {name: types.get(_mount_of(path, types), "unknown") for name, path in node.places()}
    alone = len(node.hosts) > 1 and is_node_local(node.root)
    text = ", ".join(f"{name} {kind}" for name, kind in found.items())
    return judge(alone and f"only this host sees {node.root}", text, found)


def writing(node: Node) -> Found:
    for _, path in node.places():
        with _scratch(path) as (file, new):
            for each in (file, new):
                with each.open("wb") as opened:
                    opened.write(b"rollcall")
                    os.fsync(opened.fileno())
            new.replace(file)
            if new.exists():
                return Found("bad", f"in {path}, a rename does not replace a file")
    return ok("files can be written and renamed")


def locks(node: Node) -> Found:
    with _scratch(dict(node.places())["runs"]) as (file, _), file.open("wb") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return ok("files can be locked")


def mounts(node: Node) -> Found:
    shared = {place: kind for place, kind in _mounts(node.read(MOUNTS)).items() if kind in SHARED}
    for place in shared:
        with suppress(PermissionError):  # another user's
            os.statvfs(place)  # a dead server makes this hang, which the time limit reports
    return ok(f"{len(shared)} shared file systems answer", shared)


def left_in_memory(node: Node) -> Found:
    found = []
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):  # a program that runs has removed it
            found.append(path.lstat())
    old = [it for it in found if it.st_uid == os.getuid() and time.time() - it.st_mtime > 60]
    held = sum(it.st_blocks * 512 for it in old)
    text = f"{len(old)} files of yours hold {size(held)}"
    return warn(held > 100e6 and "SLURM_JOB_ID" in node.env and text, text)


def is_node_local(root: Path) -> bool:
    """Return whether other hosts certainly do not see a directory: in memory, or below /tmp."""
    path, types = root.resolve(), _mounts(Path(MOUNTS).read_text(errors="surrogateescape"))
    mount = _mount_of(path, types)
    # A file system mounted below /tmp may be shared.
    below = (it for it in NODE_LOCAL if path.is_relative_to(it) and Path(it).is_relative_to(mount))
    return types.get(mount) in IN_MEMORY or any(below)


def _left(
    node: Node,
    measure: Callable[[os.statvfs_result], tuple[int, int]],
    show: Callable[[float], str],
    least: float,
) -> Found:
    texts, few = [], []
    for name, path in node.places():
        left, total = measure(os.statvfs(path))
        texts += [f"{name} {show(left)}"] if total else []  # btrfs makes inodes as it needs them
        if left < min(least, total / 20):
            few.append(f"{path} ({name}) has {show(left)} of {show(total)} left")
    return judge("; ".join(few), ", ".join(texts), "full" if few else "free")


def _mounts(text: str) -> dict[str, str]:
    """Return the type of the file system at each place; what is mounted last hides the others."""
    fields = [line.split(" ") for line in text.splitlines()]
    # A blank in a name is written as \040.
    name = partial(re.sub, r"\\(\d{3})", lambda code: chr(int(code[1], 8)))
    return {name(place): kind for _, place, kind, *_ in fields}


def _mount_of(path: Path, types: Mapping[str, str]) -> str:
    return max((place for place in types if path.is_relative_to(place)), key=len, default="/")


@contextmanager
def _scratch(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield two names for files, which are removed."""
    names = [folder / f".rollcall-doctor-{os.getpid()}-{time.monotonic_ns()}-{n}" for n in (1, 2)]
    try:
        yield names[0], names[1]
    finally:
        for name in names:
            name.unlink(missing_ok=True)
