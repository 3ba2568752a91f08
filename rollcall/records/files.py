"""Write files that are whole or absent, and line files that only grow. No torch."""

import contextlib
import errno
import fnmatch
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MOST_WAITING = 10_000
"""Lines kept in memory while the disk is full; beyond that, the oldest are lost."""
OBSTACLES = (errno.EISDIR, errno.EACCES, errno.ELOOP)
"""Errors of opening a file that do not go away while it lies there."""
TAIL = 16384
"""Bytes read from the end of a file by `tail`."""


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a small file so that it is whole or absent, even after a power cut.

    Raises:
        OSError: it could not be written; the previous file is untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor, has_name = _open_beside(path, beside)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor)
            # surrogateescape: names of files are bytes, not always text.
            file.write(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
            file.flush()
            os.fsync(descriptor)
            if not has_name:
                beside.unlink(missing_ok=True)
                # src_dir_fd is not needed for this path, but it makes Python follow the link.
                os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=0)
        if path.is_dir():
            set_aside(path)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_once(path: Path, text: str) -> None:
    """Write a file atomically unless it exists already: the first writer wins."""
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    write_atomic(beside, text)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)  # unlike a rename, a link never replaces a file
    finally:
        beside.unlink()


def _open_beside(path: Path, beside: Path) -> tuple[int, bool]:
    """Open a new file, if possible without a name; return whether it has the name `beside`."""
    try:  # without a name, a process killed mid-write leaves no stray file
        return os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), False
    except OSError:  # NFS does not support O_TMPFILE
        return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), True


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk: only then is a rename durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """A line file that survives a full disk: lines that cannot be written go out with the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)

    def append(self, fields: dict[str, Any]) -> None:
        """Append one object as a line, or keep it for later."""
        self._waiting.append(fields)
        with contextlib.suppress(OSError):
            while self._waiting:
                append_line(self._path, self._waiting[0])
                self._waiting.popleft()


def set_aside(path: Path) -> None:
    """Rename what lies in the place of a file that must be written: `NAME.damaged`."""
    number = len(list(path.parent.glob(f"{path.name}.damaged*")))
    path.rename(f"{path}.damaged{number or ''}")


def remove(path: Path) -> None:
    """Remove a file if it exists; a directory in its place is set aside."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        set_aside(path)


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """Append one JSON object as a new line; see `open_lines`."""
    with open_lines(path) as file:
        write_line(file, fields)


def write_line(file: BinaryIO, fields: dict[str, Any]) -> None:
    """Write one JSON object as the next line of a file of `open_lines`.

    Raises:
        OSError: the line is not in the file, or not whole; the file must be opened again.
    """
    line = json.dumps(fields).encode() + b"\n"
    while len(line) > 1:  # whoever opens the file next ends the line
        line = line[file.write(line) :]


def open_lines(path: Path) -> BinaryIO:
    """Open a line file to append to it, even if a crash cut off its last line.

    What lies there and cannot be written, such as a directory, is set aside. The file has no
    buffer: closing it would write a line once more that a full disk has refused.
    """
    try:
        file = path.open("ab+", buffering=0)
    except OSError as error:
        if error.errno not in OBSTACLES and not path.is_symlink():
            raise
        set_aside(path)
        file = path.open("ab+", buffering=0)
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
    return file


def read_lines(path: Path, having: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    """Yield the objects of a line file; lines that cannot be read are left out.

    Args:
        having: only lines with one of these texts, if any are given.
    """
    return (fields for fields in read_every_line(path, having) if fields is not None)


def read_every_line(path: Path, having: Sequence[bytes] = ()) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each complete line, None for one that cannot be read.

    A last line without its end was cut off by a crash, or is being written: if it cannot be read,
    nothing is yielded for it. A file that is missing or cannot be read has no lines.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        yield from parse_lines(
            line for line in file if not having or any(text in line for text in having)
        )


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield what `read_every_line` does, for lines in memory."""
    for line in lines:
        fields = as_object(line)
        if fields is not None or line.endswith(b"\n"):
            yield fields


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a file that holds one JSON object; None if it does not, or cannot be read."""
    found = read_value(path)
    return found if isinstance(found, dict) else None


def read_value(path: Path) -> Any:
    """Read a file that holds one JSON value; None if it does not, or cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match, by name; none in a folder that cannot be read."""
    try:
        if "/" in pattern:
            return sorted(folder.glob(pattern))
        # Path.glob costs ten times as much.
        names = os.listdir(folder)  # noqa: PTH208 (a path for each name costs more than all else)
        return [folder / name for name in sorted(fnmatch.filter(names, pattern))]
    except OSError:
        return []


def is_there(path: Path) -> bool:
    """Whether a path exists, as far as this user can see; unlike Path.exists, never an error."""
    return os.access(path, os.F_OK)


def changed(path: Path) -> float:
    """Return when a file was last changed, in seconds since 1970; 0 if it cannot be looked at."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def as_object(text: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def tail(path: Path) -> list[str]:
    """Return the last whole lines of a file; none if it is missing or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            start = file.tell()
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines
