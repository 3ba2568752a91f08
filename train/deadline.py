"""Is the end of the job so near that a checkpoint must be saved now? No torch."""

from __future__ import annotations

import json
import time
from pathlib import Path

FILE = "deadline.json"
"""In job/: when the job ends, in seconds since 1970. A launcher writes it, or nobody."""
MARGIN = 20.0
"""Seconds that shall be left besides: Slurm's timers are no better than that."""
LOOK = 5.0
"""Seconds between two looks at the file: preemption brings the end nearer."""


class Deadline:
    """The end of the job, as far as anybody has told.

    Attributes:
        has_come: whether it has been near.
    """

    def __init__(self, job: Path) -> None:
        self.has_come = False
        self._path = job / FILE
        self._end = float("inf")
        self._next_look = 0.0
        self._last = time.monotonic()

    def is_near(self, seconds: float) -> bool:
        """Whether it is time to stop; asked once per step, which tells how long one takes.

        Args:
            seconds: what a checkpoint takes; twice that is left for it.
        """
        now = time.monotonic()
        step, self._last = now - self._last, now
        if self.left() < 2 * (step + seconds) + MARGIN:
            self.has_come = True
        return self.has_come

    def left(self) -> float:
        """Seconds until the job ends, as far as anybody has told."""
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + LOOK
            try:
                self._end = float(json.loads(self._path.read_text())["end"])
            except (OSError, ValueError, KeyError):
                self._end = float("inf")
        return self._end - time.time()
