"""Do something every few seconds in a loop, and measure time in which we ran. No torch."""

import time

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
