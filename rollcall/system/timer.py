"""Repeat something every few seconds, measure when we ran, bound a look at a path. No torch."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LONGEST_TICK = 1.0
"""Seconds that count of a longer pause between two readings of a `RunningClock`, by default."""


class Every:
    """Says when the next turn of something regular is due, by the monotonic clock."""

    def __init__(self, seconds: float, at_once: bool = True) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + (0.0 if at_once else seconds)

    def is_due(self) -> bool:
        """Return True if it is time; then the wait for the next turn begins."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True

    def make_due(self, seconds: float = 0.0) -> None:
        """Bring the next turn forward, to this many seconds from now at the latest."""
        self._next = min(self._next, time.monotonic() + seconds)


class RunningClock:
    """Counts the time in which this process ran, if it is read at least every `most` seconds.

    While a process is stopped, as by `scontrol suspend`, the processes that it waits for may be
    stopped too, and continue a moment later. That time must not count as their silence.
    """

    def __init__(self, most: float = LONGEST_TICK) -> None:
        self.was_stopped = False  # whether there was a long pause before the last reading
        self._most = most
        self._seconds = 0.0
        self._last = time.monotonic()

    def read(self) -> float:
        """Return the seconds that have passed, of which a longer pause counts as `most`."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self.was_stopped = passed > 5.0
        self._seconds += min(passed, self._most)
        return self._seconds


PATIENCE = 5.0
"""Seconds after which a call hangs, as at a file server that is gone."""
_HANGING: dict[Path, threading.Thread] = {}


def hanging(root: Path) -> list[Path]:
    """Return the paths below a root about which the newest call of `in_time` got no answer."""
    return [path for path in _HANGING if path.is_relative_to(root)]


def in_time(path: Path, function: Callable[[Path], T]) -> T | None:
    """Return a function's answer about a path; None if it hangs. It must raise nothing.

    Such a call cannot be ended: its thread is left behind. Each that hangs halves the next wait.
    """
    results: list[T] = []
    thread = _HANGING.pop(path, None)
    if thread is None or not thread.is_alive():
        thread = threading.Thread(target=lambda: results.append(function(path)), daemon=True)
        thread.start()
        thread.join(max(PATIENCE / 2 ** len(_HANGING), PATIENCE / 10))
    if not results:
        _HANGING[path] = thread
    return results[0] if results else None
