"""Store the identical code of many runs once: `runs/.code` keeps each file under its digest.

The files in a run's `code/` are hard links to those in the store, so you can move or remove a run
or the whole store; the file system counts the links. The files are read-only, and files that a run
adds to its directory are its own.

An index remembers the digests of a directory's files by what `lstat` says of them, as git's index
does. So a file that has not changed since the last submission is not read again.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rollcall.records.code import digest_of, time_of
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_object, write_atomic

SETTLED = 2.0
"""Seconds that a file must be old for the index: a change in the same tick of the file system's
clock would not show."""
INDEX = ".index-"
"""Begins the names of the store's indexes."""
UNUSED = 60 * 86400.0
"""Seconds after which the index of a directory that was not submitted since is removed."""


class SourceStore:
    """The files that one user's runs in one directory share."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        """Open the store for a copy of the directory `root`; without it, no index is used."""
        self._folder = folder
        self._has_grown = False
        self._is_ours = True
        try:
            RunDir(folder.parent, folder.name).create()
        except OSError:  # others can write here, so a name proves nothing: copy every file
            self._is_ours = False
        self._index: Path | None = None
        self._known: dict[str, Any] = {}  # from the index: what lstat said, and the digest
        self._seen: dict[str, list[Any]] = {}  # the same of now
        if root is not None and self._is_ours:
            self._index = folder / f"{INDEX}{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"
            self._known = read_object(self._index) or {}

    def place(
        self, name: str, found: os.stat_result, source: str, target: str, is_shared: bool
    ) -> str:
        """Copy a file of a run, or link it to an equal one in the store; return its SHA-256.

        Args:
            name: its name in the directory that is copied.
            found: what lstat says of the source.
            is_shared: whether runs share the file; else the copy is the run's own.
        """
        if not is_shared:
            # A private file is private from the beginning.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            shutil.copy2(source, target)
            return digest_of(Path(target))
        is_program = bool(found.st_mode & 0o100)
        known = self._known.get(name)
        if known and known[:-1] == _state(found):
            self._seen[name] = known
            if self._link(known[-1], is_program, found.st_size, target):
                return str(known[-1])
        with open(source, "rb", buffering=0) as reader:  # noqa: PTH123 (no path for each file)
            before = _state(os.fstat(reader.fileno()))
            data = reader.read()
            after = os.fstat(reader.fileno())
        digest = hashlib.sha256(data).hexdigest()
        # If it changed while it was read, the next submission reads it again.
        if before == _state(after) and after.st_ctime < time.time() - SETTLED:
            self._seen[name] = [*before, digest]
        if not self._link(digest, is_program, len(data), target):
            with open(target, "xb") as writer:  # noqa: PTH123
                writer.write(data)
                writer.flush()  # before the time is set; on a full disk it raises
                os.fchmod(writer.fileno(), 0o555 if is_program else 0o444)
                os.utime(writer.fileno(), ns=(time_of(digest), time_of(digest)))
            if self._is_ours:
                self._keep(target, self._kept(digest, is_program))
        return digest

    def _keep(self, target: str, kept: str) -> None:
        """Add a finished file to the store."""
        self._has_grown = True
        with contextlib.suppress(OSError):  # no hard links on this file system: keep the copy
            try:
                os.link(target, kept)
            except FileExistsError:  # one that somebody has changed
                beside = f"{kept}.{os.getpid()}"
                os.link(target, beside)
                os.replace(beside, kept)  # noqa: PTH105 (paths are made for no file here)

    def _kept(self, digest: str, is_program: bool) -> str:
        return f"{self._folder}/{digest}{'-x' if is_program else ''}"

    def _link(self, digest: str, is_program: bool, size: int, target: str) -> bool:
        """Link a file of the store if it exists with the time and size of this digest."""
        kept = self._kept(digest, is_program)
        # OSError: the file does not exist, or has the maximum number of links.
        with contextlib.suppress(OSError):
            found = os.lstat(kept)
            if self._is_ours and (found.st_mtime_ns, found.st_size) == (time_of(digest), size):
                os.link(kept, target)
                return True
        return False

    def remember(self) -> None:
        """Write the index of the files that were read; without it, they are read again."""
        if self._index is not None and self._seen != self._known:
            with contextlib.suppress(OSError):
                write_atomic(self._index, json.dumps(self._seen))

    def tidy(self) -> None:
        """Remove files that no run uses if this run has added new ones."""
        if self._has_grown:
            for kept in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):  # another submission removed it
                    found = kept.stat()
                    is_index = kept.name.startswith(INDEX)
                    if found.st_mtime < time.time() - UNUSED if is_index else found.st_nlink == 1:
                        Path(kept).unlink()


def _state(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
