"""The output of jobs and ranks: follow it as it grows, and know when each part was written.

Logs have no time stamps. For each second in which logs of a node grew, a line beside them has the
time and their sizes.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rollcall.records.attempt import LogSizes
from rollcall.system.files import listed
from rollcall.system.timer import Every

OUTPUT_POLL = 0.5
"""Seconds between two looks at the output."""
TRACEBACK = b"Traceback (most recent call last):"
SIZES_POLL = 1.0
"""Seconds between two looks at the sizes of logs."""


class Output:
    """The files that a job writes its output to, shown from the beginning as they grow."""

    def __init__(
        self, paths: Sequence[Path], is_local: bool = False, hold: float | None = None
    ) -> None:
        self._positions = dict.fromkeys(paths, 0)
        self._is_local = is_local  # whether their writers are on this host: the files stay open
        self._files: dict[Path, FileIO] = {}
        self._hold = hold  # seconds for which a traceback, and what follows it, is held back
        self._held: dict[Path, float] = {}  # since when, by the monotonic clock

    def skip(self) -> None:
        """Leave out what the files have until now."""
        for path in self._positions:
            self._positions[path] = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        """Print what was added since the last time; as text in a notebook, which takes no bytes."""
        stream: Any = getattr(sys.stdout, "buffer", sys.stdout)
        for path, position in self._positions.items():
            while text := self._free(path, self._read(path, position)):
                position += len(text)
                stream.write(text.decode(errors="replace") if stream is sys.stdout else text)
            self._positions[path] = position
        stream.flush()

    def show_rest(self, is_wanted: bool) -> None:
        """Print what is held back, or only the path of the file that has it."""
        self._hold = None
        if is_wanted or not self._held:
            self.show()
        for path in [] if is_wanted else self._held:
            print(f"rank {rank_of(path)} lost the others; its traceback: {path}", flush=True)

    def _read(self, path: Path, position: int) -> bytes:
        """Return further text; none if the file has not begun, or cannot be read now."""
        with contextlib.suppress(OSError):
            file = self._files.pop(path, None) or path.open("rb", buffering=0)
            text = os.pread(file.fileno(), 1 << 20, position)  # file.read first asks for the size
            if self._is_local:
                self._files[path] = file
            else:  # on NFS, only a file that was just opened is sure to be up to date
                file.close()
            return text
        return b""

    def _free(self, path: Path, text: bytes) -> bytes:
        """Return the part of new text that need not be held back."""
        now, begin = time.monotonic(), text.find(TRACEBACK)
        if self._hold is None or begin < 0:
            return text
        if now - self._held.setdefault(path, now) > self._hold:  # its program goes on
            del self._held[path]
            return text
        return text[: text.rfind(b"\n", 0, begin) + 1]


def follow(output: Output, is_over: Callable[[], bool]) -> None:
    """Show a job's output until the job is over."""
    while not is_over():
        output.show()
        time.sleep(OUTPUT_POLL)
    output.show()


class LogPart(NamedTuple):
    """A stretch of a log written within a second; its time is infinite if it is not known yet."""

    time: float
    rank: int
    path: Path
    start: int
    end: int


class LogWatcher:
    """Writes down how the logs of one node grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()  # as /proc has it
        self._sizes: dict[int, int] = {}
        self._timer = Every(SIZES_POLL)
        self._lines: BinaryIO | None = None

    def look(self, ranks: Sequence[int]) -> None:
        """Note which logs have grown, if it is time to, by how far these processes have written."""
        if self._timer.is_due():
            sizes = [_written(pid, self._folder) for pid in ranks]
            self._note(dict(size for size in sizes if size))

    def end(self) -> None:
        """Note how long the logs are when all ranks have ended."""
        paths = logs_in(self._folder, "rank-*.log")
        self._note({rank_of(path): path.stat().st_size for path in paths})
        self._close()

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._lines = None

    def _note(self, sizes: Mapping[int, int]) -> None:
        grown = {rank: size for rank, size in sizes.items() if size != self._sizes.get(rank, 0)}
        if grown:
            self._sizes.update(grown)
            line = LogSizes(time.time(), {str(rank): size for rank, size in grown.items()})
            try:
                self._lines = self._lines or LogSizes.open(self._folder)
                line.write_to(self._lines)
            except OSError:  # a full disk must not end a run
                self._close()


def _written(pid: int, folder: Path) -> tuple[int, int] | None:
    """Return the rank and the bytes of a process's log, from /proc: a look at the log is slow."""
    with contextlib.suppress(OSError, ValueError):  # it has ended, or writes elsewhere
        log = Path(f"/proc/{pid}/fd/1").readlink()
        state = Path(f"/proc/{pid}/fdinfo/1").read_text()
        return (rank_of(log), int(state.split()[1])) if log.parent == folder else None
    return None


def parts(folder: Path, paths: list[Path]) -> Iterator[LogPart]:
    """Yield the stretches of these logs of one node, each log's in order."""
    places = {str(rank_of(path)): path for path in paths}
    sizes = {rank: path.stat().st_size for rank, path in places.items()}
    position = dict.fromkeys(places, 0)
    recorded = [(line.time, item) for line in LogSizes.read(folder) for item in line.sizes.items()]
    for time_, (rank, size) in [*recorded, *((float("inf"), item) for item in sizes.items())]:
        # A damaged line may have any number.
        if rank in places and position[rank] < (end := min(size, sizes[rank])):
            yield LogPart(time_, int(rank), places[rank], position[rank], end)
            position[rank] = end


def logs_in(folder: Path, pattern: str) -> list[Path]:
    """Return the ranks' logs that match; other files may lie beside them."""
    name = re.compile(r".*/node-[0-9]{1,9}/rank-[0-9]{1,9}\.log")
    return [path for path in listed(folder, pattern) if name.fullmatch(str(path))]


def nodes_of_ranks(logs: Path) -> dict[int, int]:
    """Return the node of each rank that has a log in the folder of an attempt."""
    paths = logs_in(logs, "node-*/rank-*.log")
    return {rank_of(path): int(path.parent.name.removeprefix("node-")) for path in paths}


def rank_of(path: Path) -> int:
    """Return the rank whose log this is."""
    return int(path.stem.removeprefix("rank-"))
