"""Equal code of many runs is on disk once: `runs/.code` keeps each file under its digest.

A run's code is a directory of its own whose files are further names (hard links) of those in the
store. So a run, or the whole store, can be moved or removed by itself: nobody counts who needs
what but the file system. The files are read-only, and what runs write into their directories is
theirs alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from train.run import RunDir


class Store:
    """The files that the runs of one user share in one place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_grown = False
        self._is_ours = True
        try:
            RunDir(folder.parent, folder.name).create()
        except OSError:  # where others may write, a digest tells nothing: runs have whole copies
            self._is_ours = False

    def place(self, source: Path, target: Path) -> str:
        """Give a run a file: a name of the one that is there, or the first of its kind.

        Returns:
            The SHA-256 of the contents.

        Raises:
            OSError: the file cannot be read, or the run directory cannot be written.
        """
        found = source.stat()
        suffix = "-x" if found.st_mode & 0o100 else ""
        digest = digest_of(source)
        state = (_time(digest), found.st_size)
        if self._is_ours and _link(self._folder / (digest + suffix), target, state):
            return digest
        shutil.copyfile(source, target)
        target.chmod(0o555 if suffix else 0o444)
        digest = digest_of(target)  # the source may have changed meanwhile
        os.utime(target, ns=(_time(digest), _time(digest)))
        if self._is_ours:
            kept = self._folder / (digest + suffix)
            beside = kept.with_name(f".{kept.name}.{os.getpid()}")
            with contextlib.suppress(OSError):  # no hard links here: the run has a whole copy
                os.link(target, beside)
                beside.replace(kept)
                self._has_grown = True
        return digest

    def tidy(self) -> None:
        """Remove the files that no run has any more, if there are new ones."""
        if self._has_grown:
            for kept in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):  # another submission was quicker
                    if kept.stat().st_nlink == 1:
                        Path(kept).unlink()


def _link(kept: Path, target: Path, state: tuple[int, int]) -> bool:
    """Give a file of the store a further name, if it is there with this time and size."""
    # OSError: it is not there, or has as many names as the file system allows.
    with contextlib.suppress(OSError):
        found = kept.lstat()
        if (found.st_mtime_ns, found.st_size) == state:
            os.link(kept, target)
            return True
    return False


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _time(digest: str) -> int:
    """When a file of the store was written last, in nanoseconds since 1970: a date of its own.

    One that says otherwise was written to, by root or after a chmod, and is given to no further
    run. And Python takes compiled code for current by the date and size of the source.
    """
    return (315532800 + int(digest[:6], 16)) * 10**9  # in 1980
