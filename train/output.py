"""What if the disk of a log is full? Then lines are lost, and the training goes on. No torch."""

from __future__ import annotations

import errno
import io
import sys

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


class _Lossy(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlast_full_disks() -> None:
    """Let this process go on where its output goes to a disk that is full, or read-only."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # somebody reads it here
            continue
        stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, lossy)
