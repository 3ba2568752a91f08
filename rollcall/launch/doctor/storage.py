"""Disks and file systems that a run uses."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rollcall.launch.doctor.check import LocalNode, Result, judge
from rollcall.messages.text import size

SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.sshfs", "pvfs2")
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
SCRATCH = ".rollcall-doctor-"


def free_space(node: LocalNode) -> Result:
    return _left(node, lambda fs: (fs.f_bavail * fs.f_frsize, fs.f_blocks * fs.f_frsize), size, 1e9)


def free_inodes(node: LocalNode) -> Result:
    return _left(node, lambda fs: (fs.f_favail, fs.f_files), "{:,.0f} inodes".format, 1e4)


def file_system(node: LocalNode) -> Result:
    types = _mounts()
    points = {name: _mount_of(path, types) for name, path in node.directories()}
    kinds = {name: types.get(point, "unknown") for name, point in points.items()}
    alone = len(node.hosts) > 1 and is_node_local(node.root)
    text = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    return judge(alone and f"only this host sees {node.root}", text, kinds)


def writing(node: LocalNode) -> Result:
    for _, path in node.directories():
        with TemporaryDirectory(prefix=SCRATCH, dir=path) as folder:
            file, new = Path(folder, "file"), Path(folder, "new")
            for name in (file, new):
                with name.open("wb") as opened:
                    opened.write(b"rollcall")
                    os.fsync(opened.fileno())
            new.replace(file)
            if new.exists():
                return Result("bad", f"in {path}, a rename does not replace a file")
    return Result("ok", "files can be written and renamed")


def mounts(_node: LocalNode) -> Result:
    shared = {path: kind for path, kind in _mounts().items() if kind in SHARED}
    for path in shared:
        with suppress(PermissionError):  # another user's
            os.statvfs(path)  # a dead server makes this hang, which the time limit reports
    return Result("ok", f"{len(shared)} shared file systems answer", shared)


def is_node_local(root: Path) -> bool:
    """Return True if other hosts certainly do not see a directory: in memory, or below /tmp."""
    path, types = root.resolve(), _mounts()
    mount = _mount_of(path, types)
    # A file system mounted below /tmp may be shared.
    local = [folder for folder in NODE_LOCAL if path.is_relative_to(folder)]
    is_below = any(Path(folder).is_relative_to(mount) for folder in local)
    return types.get(mount) in IN_MEMORY or is_below


def _left(
    node: LocalNode,
    measure: Callable[[os.statvfs_result], tuple[int, int]],
    show: Callable[[float], str],
    least: float,
) -> Result:
    texts, few = [], []
    for name, path in node.directories():
        left, total = measure(os.statvfs(path))
        texts += [f"{name} {show(left)}"] if total else []  # btrfs makes inodes as it needs them
        if left < min(least, total / 20):
            few.append(f"{path} ({name}) has {show(left)} of {show(total)} left")
    return judge("; ".join(few), ", ".join(texts), "full" if few else "free")


def _mounts() -> dict[str, str]:
    """Return the type of the file system at each mount point; the last mount hides the others."""
    return {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}


def _mount_of(path: Path, types: Mapping[str, str]) -> str:
    return max((point for point in types if path.is_relative_to(point)), key=len, default="/")
