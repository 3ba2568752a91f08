"""When was which part of a rank's log written? Beside a node's logs, so that they stay as they are.

times.jsonl has a line for every second in which a log of the node grew: the time, by the node's
clock, and the sizes of the logs that grew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train.run import append_line, read_lines

EVERY = 1.0
"""Seconds between two looks at the sizes."""


class Part(NamedTuple):
    """A stretch of a log that was written within a second; infinite for what has no stamp yet."""

    time: float
    rank: int
    path: Path
    start: int
    end: int


class Stamps:
    """Writes down how the logs of one node grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}
        self._next = 0.0

    def look(self, at_once: bool = False) -> None:
        """Note what has grown, if it is time to."""
        if not at_once and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        sizes = {path: path.stat().st_size for path in self._folder.glob("rank-*.log")}
        grown = {
            rank_of(path): size for path, size in sizes.items() if size != self._sizes.get(path, 0)
        }
        if grown:
            with contextlib.suppress(OSError):  # a full disk: no reason to end a run
                append_line(self._folder / "times.jsonl", {"time": time.time(), "sizes": grown})
            self._sizes = sizes


def parts(folder: Path, paths: list[Path]) -> Iterator[Part]:
    """The stretches of these logs of one node, each log's in order."""
    places = {str(rank_of(path)): path for path in paths}
    position = dict.fromkeys(places, 0)
    for line in read_lines(folder / "times.jsonl"):
        for rank, size in line["sizes"].items():
            if rank in places:
                yield Part(line["time"], int(rank), places[rank], position[rank], size)
                position[rank] = size
    for rank, path in places.items():
        size = path.stat().st_size
        if size > position[rank]:
            yield Part(float("inf"), int(rank), path, position[rank], size)


def rank_of(path: Path) -> int:
    """The rank whose log this is."""
    return int(path.stem.removeprefix("rank-"))
