"""The source of the copy of a run's code, and damage to the copy. No torch."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollcall.records.run import Record
from rollcall.system.files import open_regular, read_object, write_atomic


@dataclass(frozen=True)
class CodeRecord(Record):
    """The source of a copy of the code; in job/ as `source.json` and `rollcall.json`."""

    root: str  # the directory that was copied
    shared: list[str]  # suffixes of the files that runs share
    files: dict[str, str | None]  # SHA-256 of each file; None for links
    commit: str | None = None  # of the checkout; None outside git
    modified: bool = False  # True if the checkout had uncommitted changes

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the record; None if it is missing or cannot be read."""
        return cls.parse(read_object(path))

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        write_atomic(path, json.dumps(self.as_dict()) + "\n")

    def damage(self, copy: Path, more: Sequence[str] = ()) -> Iterator[tuple[str, bool]]:
        """Yield the shared files, and those with `more` suffixes, that differ; True if missing."""
        for name, digest in self.files.items():
            if digest is None or not name.endswith((*self.shared, *more)):
                continue  # a script may change or remove its other files
            try:
                # The time of a file of the store shows that it is unchanged.
                time = (copy / name).stat().st_mtime_ns
                if time != time_of(digest) and digest_of(copy / name) != digest:
                    yield name, False
            except (FileNotFoundError, NotADirectoryError):
                yield name, True
            except OSError:  # a passing error of the disk: the file may exist
                continue
            except ValueError:  # the record is damaged
                yield name, False


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def time_of(digest: str) -> int:
    """Return the time in ns since 1970, by its digest, of a stored file that nobody has changed."""
    return (315532800 + int(digest[:6], 16)) * 10**9  # in 1980
