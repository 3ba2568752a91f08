"""Record when each part of a rank's log was written, without adding time stamps to the logs.

For each second in which logs of the node grew, a line beside them has the time and their sizes.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rollcall.records.attempt import LogSizes
from rollcall.records.files import listed
from rollcall.timer import Every

EVERY = 1.0
"""Seconds between two looks at the sizes."""


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
        self._timer = Every(EVERY)
        self._lines: BinaryIO | None = None

    def look(self, ranks: Sequence[int]) -> None:
        """Note which logs have grown, if it is time to, by how far these processes have written."""
        if self._timer.is_due():
            found = [_written(pid, self._folder) for pid in ranks]
            self._note(dict(each for each in found if each))

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
    """Return which rank a process is and the bytes of its log, from /proc; None for another one.

    A look at the file itself, by all nodes every second, would load a shared file system.
    """
    try:
        log = Path(f"/proc/{pid}/fd/1").readlink()
        state = Path(f"/proc/{pid}/fdinfo/1").read_text()
        return (rank_of(log), int(state.split()[1])) if log.parent == folder else None
    except (OSError, ValueError):  # it has ended, or writes elsewhere
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
    found = logs_in(logs, "node-*/rank-*.log")
    return {rank_of(path): int(path.parent.name.removeprefix("node-")) for path in found}


def rank_of(path: Path) -> int:
    """Return the rank whose log this is."""
    return int(path.stem.removeprefix("rank-"))
