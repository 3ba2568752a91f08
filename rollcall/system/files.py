"""Write files that are whole or absent, and line files that only grow. No torch."""

import contextlib
import errno
import fnmatch
import glob
import itertools
import json
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

MOST, MOST_LINE = 2**34, 2**24
"""Bytes of the largest line file that is read, and of a line; a longer line ends the file."""
TAIL = 16384
"""Bytes read from the end of a file by `tail`."""


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write a small file so that it is whole or as before, even after a power cut or an OSError."""
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with beside.open("wb") as file:
            # surrogateescape: names of files are bytes, not always text.
            file.write(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
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
        # While the disk is full, lines stay in memory; of more than these, the oldest are lost.
        self._waiting: deque[dict[str, Any]] = deque(maxlen=10_000)

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
        # Other errors may go away while it lies there.
        if error.errno not in (errno.EISDIR, errno.EACCES, errno.ELOOP) and not path.is_symlink():
            raise
        set_aside(path)
        file = path.open("ab+", buffering=0)
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
    return file


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a file to read it, with further flags of os.open, such as O_NOFOLLOW.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which could block for ever.
    """
    is_typed = path.is_relative_to("/dev/fd") or path == Path("/dev/stdin")  # such as <(program)
    descriptor = os.open(path, os.O_RDONLY | flags | (0 if is_typed else os.O_NONBLOCK))
    if not is_typed and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        what = "it is a directory" if path.is_dir() else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return open(descriptor, "rb")  # noqa: PTH123 (a descriptor)


def read_whole(path: Path, most: int = 2**26, flags: int = 0) -> bytes:
    """Return the content of a file; OSError if it is larger, or `open_regular` refuses it."""
    with open_regular(path, flags) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB", str(path))
    return content


def read_lines(path: Path, having: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's readable lines, or of those with a text of `having`."""
    with contextlib.suppress(OSError):
        for line in text_lines(path):
            is_wanted = not having or any(text in line for text in having)
            if is_wanted and (fields := as_object(line)) is not None:
                yield fields


def text_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, up to one that is too long for a record; OSError for no file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= MOST:
            lines = iter(lambda: file.readline(MOST_LINE), b"")
            yield from itertools.takewhile(lambda line: len(line) < MOST_LINE, lines)


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each complete line, None for one that cannot be read.

    A last line without its end was cut off by a crash, or is being written: if it cannot be read,
    nothing is yielded for it.
    """
    for line in lines:
        fields = as_object(line)
        if fields is not None or line.endswith(b"\n"):
            yield fields


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a file that holds one JSON object; None if it does not, or cannot be read."""
    value = read_value(path)
    return value if isinstance(value, dict) else None


def read_value(path: Path) -> Any:
    """Read a file that holds one JSON value; None if it does not, or cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(read_whole(path))
    return None


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match, by name; none in a folder that cannot be read."""
    with contextlib.suppress(OSError):
        if "/" in pattern:
            return sorted(folder.glob(pattern))
        # Path.glob costs ten times as much.
        names = os.listdir(folder)  # noqa: PTH208 (a path for each name costs more than all else)
        return [folder / name for name in sorted(fnmatch.filter(names, pattern))]
    return []


def stranger(path: Path) -> str:
    """Return a file's owner; empty if that is this user, root or who installed rollcall."""
    try:
        uid = path.stat().st_uid
        is_ours = uid in (0, os.geteuid(), Path(__file__).stat().st_uid)
        return "" if is_ours else pwd.getpwuid(uid).pw_name
    except (OSError, KeyError) as error:
        return f"user {uid}" if isinstance(error, KeyError) else ""


def is_there(path: Path) -> bool:
    """Return True if a path exists and this user can see it; unlike Path.exists, never raise."""
    return os.access(path, os.F_OK)


def matches(pattern: str) -> bool:
    """Return True if a path has this name, or if a pattern of paths matches one."""
    return is_there(Path(pattern)) or any(glob.iglob(pattern, recursive=True))  # noqa: PTH207


def closest(path: Path) -> Path:
    """Return a path, or the closest directory above it, that exists."""
    return next(known for known in (path, *path.parents) if is_there(known))


def changed(path: Path) -> float:
    """Return when a file was last changed, in seconds since 1970; 0 if it cannot be looked at."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def as_object(text: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    return None


def tail(path: Path) -> list[str]:
    """Return the last whole lines of a file; none if it is missing or cannot be read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        start = file.tell()
        lines = file.read().decode(errors="replace").splitlines()
        return lines[1:] if start else lines
    return []
