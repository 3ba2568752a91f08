"""The source of the copy of a run's code, and whether the copy is still whole. No torch."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollcall.records.files import read_object, write_atomic
from rollcall.records.run import Record


@dataclass(frozen=True)
class CodeRecord(Record):
    """The source of a copy of the code; in job/ as `source.json` and `rollcall.json`."""

    root: str  # the directory that was copied
    bytes: int  # size of all files
    shared: list[str]  # suffixes of the files that runs share
    files: dict[str, str | None]  # SHA-256 of each file; None for links
    commit: str | None = None  # of the checkout; None outside git
    modified: bool = False  # whether the checkout had uncommitted changes

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the record; None if it is missing or cannot be read."""
        return cls.parse(read_object(path))

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        write_atomic(path, json.dumps(self.as_dict()) + "\n")

    def damage(self, copy: Path) -> Iterator[tuple[str, bool]]:
        """Yield the files that runs share and that differ from the record.

        Yields:
            The name of a file, and whether it is missing; if not, its content has changed.
        """
        for name, digest in self.files.items():
            if digest is None or not name.endswith(tuple(self.shared)):
                continue  # a script may change or remove its other files
            try:
                # The time of a file of the store shows that it is unchanged.
                found = (copy / name).stat()
                if found.st_mtime_ns != time_of(digest) and digest_of(copy / name) != digest:
                    yield name, False
            except (FileNotFoundError, NotADirectoryError):
                yield name, True
            except OSError:  # the disk fails for a moment: the file may be there
                continue
            except ValueError:  # the record is damaged
                yield name, False


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def time_of(digest: str) -> int:
    """Return the modification time of a file in the store, in nanoseconds since 1970.

    It follows from the digest: a file with another time was changed and is not used again.
    """
    return (315532800 + int(digest[:6], 16)) * 10**9  # in 1980
