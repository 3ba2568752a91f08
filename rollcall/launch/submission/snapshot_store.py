"""Store the identical code of many runs once: `runs/.code` keeps each file under its digest.

The files in a run's `code/` are hard links to those in the store, so you can move or remove a run
or the whole store; the file system counts the links. The files are read-only, and files that a run
adds to its directory are its own.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from rollcall.records.code import digest_of, time_of
from rollcall.records.run_dir import RunDir


class SourceStore:
    """The files that one user's runs in one directory share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_grown = False
        self._is_ours = True
        try:
            RunDir(folder.parent, folder.name).create()
        except OSError:  # others can write here, so a name proves nothing: copy every file
            self._is_ours = False

    def place(self, source: str, target: str, is_shared: bool) -> str:
        """Copy a file, or link it to an equal one if it `is_shared`; return its SHA-256."""
        if not is_shared:
            # A private file is private from the beginning.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            shutil.copy2(source, target)
            return digest_of(Path(target))
        with open(source, "rb", buffering=0) as reader:  # noqa: PTH123 (no path for each file)
            is_program = bool(os.fstat(reader.fileno()).st_mode & 0o100)
            data = reader.read()
        digest = hashlib.sha256(data).hexdigest()
        kept = f"{self._folder}/{digest}{'-x' if is_program else ''}"
        # OSError: the file does not exist, or has the maximum number of links.
        with contextlib.suppress(OSError):
            found = os.lstat(kept)
            if self._is_ours and (found.st_mtime_ns, found.st_size) == (time_of(digest), len(data)):
                os.link(kept, target)
                return digest
        with open(target, "xb") as writer:  # noqa: PTH123
            writer.write(data)
            writer.flush()  # before the time is set; on a full disk it raises
            os.fchmod(writer.fileno(), 0o555 if is_program else 0o444)
            os.utime(writer.fileno(), ns=(time_of(digest), time_of(digest)))
        if self._is_ours:
            self._keep(target, kept)
        return digest

    def _keep(self, target: str, kept: str) -> None:
        self._has_grown = True
        with contextlib.suppress(OSError):  # no hard links on this file system: keep the copy
            try:
                os.link(target, kept)
            except FileExistsError:  # one that somebody has changed
                beside = f"{kept}.{os.getpid()}"
                os.link(target, beside)
                os.replace(beside, kept)  # noqa: PTH105 (paths are made for no file here)

    def tidy(self) -> None:
        """Remove files that no run uses if this run has added new ones."""
        if self._has_grown:
            for kept in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):  # another submission removed it
                    if kept.stat().st_nlink == 1:
                        Path(kept).unlink()
