"""Is the end of the job so near that a checkpoint must be saved now? No torch."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

FILE = "deadline.json"
"""In job/: when the job ends, in seconds since 1970. A launcher writes it, or nobody."""
MARGIN = 20.0
"""Seconds that shall be left besides: Slurm's timers are no better than that."""
LOOK = 5.0
"""Seconds between two looks at the file: preemption brings the end nearer."""
VERDICT = 10.0
"""Seconds before the end at which the last save is given up: the run has to leave in order."""
LEAST = 1.0
"""With less than that left there is no leaving in order, and the save is not given up."""


class Deadline:
    """The end of the job, as far as anybody has told.

    Attributes:
        has_come: whether it has been near.
    """

    def __init__(self, job: Path) -> None:
        self.has_come = False
        self._path = job / FILE
        self._end = math.inf
        self._next_look = 0.0
        self._began = time.time()
        self._last = time.monotonic()
        self._margin = VERDICT

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
            told = self._end
            try:
                self._end = float(json.loads(self._path.read_text())["end"])
            except (OSError, ValueError, KeyError):
                self._end = math.inf
            if self._end < self._began:  # that of an earlier job: here nobody tells of an end
                self._end = math.inf
            if self._end != told:
                self._share_out()
        return self._end - time.time()

    def begin_last_save(self) -> None:
        """Give the last save what is left until `VERDICT`, or half of it where that is little."""
        self._next_look = 0.0
        self.left()
        self._share_out()

    def is_late(self) -> bool:
        """Whether the last save must be given up, as it leaves no time for the verdict."""
        return self.left() < self._margin

    def _share_out(self) -> None:
        left = self._end - time.time()
        self._margin = min(VERDICT, left / 2) if left > LEAST else -math.inf
