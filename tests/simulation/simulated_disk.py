"""A shared file system in memory, as the clients of NFS or Lustre see it.

Each operation takes time, which depends on the host, and may fail or stall. A client keeps names
and the content of open files for a while, so it may see the changes of others late.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from simulated_time import Clock, current

ROOT = "/sim"
FIRST = 1 << 20
"""The first number of a simulated open file; real ones are smaller."""
_numbers = itertools.count(FIRST)  # of all disks: Python may close a file of an earlier one late


@dataclass(eq=False)
class Inode:
    """A file, or a directory."""

    number: int
    names: dict[str, Inode] | None = None  # of a directory
    content: bytes = b""
    changed: float = 0.0


@dataclass
class OpenFile:
    """An open file of a host."""

    inode: Inode
    path: str
    host: Any
    flags: int
    position: int = 0
    cached: bytes | None = None  # the content as this host has it, if it keeps it
    unsent: bytes | None = None  # content that the server does not have yet


@dataclass
class Entry:
    """What os.scandir yields."""

    name: str
    path: str
    inode: Inode | None

    def is_dir(self) -> bool:
        return self.inode is not None and self.inode.names is not None

    def is_symlink(self) -> bool:
        return False


@dataclass
class Client:
    """A host's view of the file system."""

    latency: float = 0.001  # seconds of an operation, on average
    visibility: float = 0.0  # seconds for which a name may be out of date
    stalled_until: float = 0.0
    broken_until: float = 0.0  # until then, some operations fail
    error: int = errno.EIO
    names: dict[str, tuple[float, Inode | None]] = field(default_factory=dict)


class Disk:
    """The file system; its methods are those of `os`, for the host of the current task."""

    def __init__(self, clock: Clock, random: Any) -> None:
        self.clock, self.random = clock, random
        self.stalled_until = 0.0
        self.operations: Counter[tuple[int, int, str]] = Counter()  # by second, host and call
        self.writes: list[Any] = []  # called with each path that got another content
        self._root = Inode(0, {ROOT.strip("/"): Inode(1, {})})
        self._files: dict[int, OpenFile] = {}

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        del mode
        client = self._begin("open", path, is_change=bool(flags & (os.O_CREAT | os.O_WRONLY)))
        inode = self._seen(client, path)
        if inode is None and flags & os.O_CREAT:
            inode = self._get(path)
        if inode is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "exists", path)
        if inode is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            inode = Inode(self._number())
            self._put(client, path, inode)
            self._report(path)
        if inode.names is not None and flags & (os.O_WRONLY | os.O_RDWR):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        if flags & os.O_TRUNC:
            inode.content = b""
        number = self._number()
        self._files[number] = OpenFile(inode, path, client, flags)
        return number

    def close(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is not None:
            self._send(file)
            self._count("close")

    def fsync(self, number: int) -> None:
        self._begin("fsync", self._files[number].path)
        self._send(self._files[number])

    def posix_fadvise(self, number: int, *_: int) -> None:
        self._send(self._files[number])
        self._files[number].cached = None

    def pread(self, number: int, size: int, offset: int) -> bytes:
        file = self._files[number]
        if file.cached is None:
            self._begin("read", file.path)
            file.cached = file.inode.content
        return file.cached[offset : offset + size]

    def pwrite(self, number: int, data: bytes, offset: int) -> int:
        file = self._files[number]
        self._begin("write", file.path, is_change=True)
        old = file.inode.content if file.unsent is None else file.unsent
        file.unsent = old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :]
        return len(data)

    def write(self, number: int, data: Any) -> int:
        """Write at the position, or at the end of a file that was opened to append."""
        file, text = self._files[number], bytes(data)
        self._begin("write", file.path, is_change=True)
        inode = file.inode
        if file.flags & os.O_APPEND:
            file.position = len(inode.content)
        inode.content = inode.content[: file.position].ljust(file.position, b"\0") + text
        file.position += len(text)
        inode.changed = self.clock.now
        self._report(file.path)
        return len(text)

    def read(self, number: int) -> bytes:
        self._begin("read", self._files[number].path)
        return self._files[number].inode.content

    def link(self, source: str, target: str) -> None:
        client = self._begin("link", target, is_change=True)
        inode = self._get(source)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        if self._get(target) is not None:
            client.names.pop(target, None)
            raise FileExistsError(errno.EEXIST, "exists", target)
        self._put(client, target, inode)

    def replace(self, source: str, target: str) -> None:
        client = self._begin("rename", target, is_change=True)
        inode = self._get(source)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        self._put(client, target, inode)
        self._remove(client, source)
        self._report(target)

    def unlink(self, path: str) -> None:
        client = self._begin("unlink", path, is_change=True)
        if self._get(path) is None:
            client.names.pop(path, None)
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self._remove(client, path)
        self._report(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        del mode
        client = self._begin("mkdir", path, is_change=True)
        if self._get(path) is not None:
            client.names.pop(path, None)  # the answer of the server corrects what was kept
            raise FileExistsError(errno.EEXIST, "exists", path)
        self._put(client, path, Inode(self._number(), {}))
        self._report(path)

    def listdir(self, path: str) -> list[str]:
        inode = self._seen(self._begin("list", path), path)
        if inode is None or inode.names is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return sorted(inode.names)

    def scandir(self, path: str) -> Any:
        inode, names = self._get(path), self.listdir(path)
        assert inode is not None and inode.names is not None
        entries = [Entry(name, f"{path}/{name}", inode.names.get(name)) for name in names]
        return contextlib.nullcontext(iter(entries))

    def stat(self, path: str) -> os.stat_result:
        inode = self._seen(self._begin("stat", path), path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._status(inode)

    def fstat(self, number: int) -> os.stat_result:
        return self._status(self._files[number].inode)

    def access(self, path: str) -> bool:
        with contextlib.suppress(OSError):  # os.access raises none
            return self._seen(self._begin("access", path), path) is not None
        return False

    def peek(self, path: str) -> bytes | None:
        """Return the content of a file as the server has it, at once; None without one."""
        inode = self._get(path)
        return None if inode is None else inode.content

    def close_all_of(self, client: Client) -> None:
        """Forget the open files of a host that is gone; what was not sent is lost."""
        self._files = {n: file for n, file in self._files.items() if file.host is not client}

    def _begin(self, call: str, path: str, is_change: bool = False) -> Client:
        """Let an operation take its time; raise OSError if it fails."""
        task = self.clock.task()
        client: Client = task.process.host.client
        self._count(call)
        wait = client.latency * self.random.expovariate(1.0)
        while True:
            self.clock.sleep(wait)
            wait = max(client.stalled_until, self.stalled_until) - self.clock.now
            if wait <= 0:
                break
        if self.clock.now < client.broken_until:
            is_hit = is_change if client.error == errno.ENOSPC else self.random.random() < 0.3
            if is_hit:
                raise OSError(client.error, os.strerror(client.error), path)
        return client

    def _count(self, call: str) -> None:
        task = current()
        if task is not None:
            number = task.process.host.number
            self.operations[int(self.clock.now), number, call] += 1

    def _seen(self, client: Client, path: str) -> Inode | None:
        """Return what the client takes a name for."""
        known = client.names.get(path)
        if known is not None and self.clock.now < known[0]:
            return known[1]
        inode = self._get(path)
        if client.visibility:
            until = self.clock.now + client.visibility * self.random.random()
            client.names[path] = (until, inode)
        return inode

    def _get(self, path: str) -> Inode | None:
        inode: Inode | None = self._root
        for name in path.strip("/").split("/"):
            if name not in ("", "."):
                inode = (inode.names or {}).get(name) if inode is not None else None
        return inode

    def _put(self, client: Client, path: str, inode: Inode) -> None:
        folder, _, name = path.rpartition("/")
        parent = self._get(folder)
        if parent is None or parent.names is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", folder)
        parent.names[name] = inode
        inode.changed = self.clock.now
        client.names.pop(path, None)

    def _remove(self, client: Client, path: str) -> None:
        folder, _, name = path.rpartition("/")
        parent = self._get(folder)
        assert parent is not None and parent.names is not None
        del parent.names[name]
        client.names.pop(path, None)

    def _send(self, file: OpenFile) -> None:
        if file.unsent is not None:
            file.inode.content, file.unsent = file.unsent, None
            file.inode.changed = self.clock.now

    def _report(self, path: str) -> None:
        for watcher in self.writes:
            watcher(path)

    def _number(self) -> int:
        return next(_numbers)

    def _status(self, inode: Inode) -> os.stat_result:
        kind = stat.S_IFREG if inode.names is None else stat.S_IFDIR
        size, when, user = len(inode.content), inode.changed, os.geteuid()
        return os.stat_result((kind | 0o700, inode.number, 1, 1, user, 0, size, when, when, when))


class File(io.RawIOBase):
    """An open file object of the simulated disk."""

    def __init__(self, disk: Disk, number: int) -> None:
        self._disk, self._number, self._content, self._at = disk, number, b"", 0
        file = disk._files[number]
        if not file.flags & os.O_WRONLY:
            self._content = file.inode.content if file.flags & os.O_RDWR else disk.read(number)
            self._at = len(self._content) if file.flags & os.O_APPEND else 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        return self._disk.write(self._number, data)

    def close(self) -> None:
        if not self.closed:
            self._disk.close(self._number)
        super().close()
