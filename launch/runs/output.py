"""Follow a job's output until the job is over, and read its exit code."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from rollcall.launch.runs import find
from rollcall.run_dir import RunDir

CHUNK = 1 << 20
"""Bytes that are read at once."""
LOOK = 0.5
"""Seconds between two looks at the output."""


class Output:
    """The files that a job writes its output to, shown from the beginning as they grow."""

    def __init__(self, paths: Sequence[Path], is_local: bool = False) -> None:
        self._positions = dict.fromkeys(paths, 0)
        self._is_local = is_local  # whether their writers are on this host: the files stay open
        self._files: dict[Path, FileIO] = {}

    def skip(self) -> None:
        """Leave out what the files have until now."""
        for path in self._positions:
            self._positions[path] = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        """Print what was added since the last time."""
        for path, position in self._positions.items():
            with contextlib.suppress(FileNotFoundError):  # it has not begun
                file = self._files.get(path) or path.open("rb", buffering=0)
                # Not file.read, which asks for the size of the file first.
                while text := os.pread(file.fileno(), CHUNK, position):
                    position += len(text)
                    sys.stdout.buffer.write(text)
                self._positions[path] = position
                if self._is_local:
                    self._files[path] = file
                else:  # on NFS, only a file that was just opened is sure to be up to date
                    file.close()
        sys.stdout.buffer.flush()


def follow(output: Output, is_over: Callable[[], bool]) -> None:
    """Show a job's output until the job is over."""
    while not is_over():
        output.show()
        time.sleep(LOOK)
    output.show()


def exit_code(run: RunDir, job_id: str) -> int | None:
    """Return the exit code of the newest attempt in this job; None if it is not known."""
    codes = [attempt.exit_code for attempt in find.attempts(run) if attempt.job == job_id]
    return codes[-1] if codes else None
