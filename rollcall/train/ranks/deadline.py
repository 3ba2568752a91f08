"""Is the end of the job so near that a checkpoint must be saved now? No torch."""

import math
import time
from pathlib import Path

from rollcall.records.run import JobEnd
from rollcall.system.timer import Every

MARGIN = 20.0
"""Seconds to spare, because Slurm's timers are no more precise than that."""
LOOK = 5.0
"""Seconds between two looks at the file: a preemption brings the end nearer."""
SURE = 2.0
"""Seconds for which the end must have been near."""
VERDICT = 10.0
"""Seconds before the end at which the last save is given up, so that the run can exit in order."""
LEAST = 1.0
"""With less time than this, an orderly exit is impossible, and the save is not given up."""


class Deadline:
    """The end of the job, if a launcher has written it into the run directory."""

    def __init__(self, directory: Path) -> None:
        self.has_come = False  # whether the end has been near
        self.save_seconds = 0.0  # how long the newest save took
        self._directory, self._look = directory, Every(LOOK)
        self._end, self._margin = math.inf, VERDICT
        self._began, self._last = time.time(), time.monotonic()
        self._near_since = math.inf  # by the monotonic clock

    def is_near(self, seconds: float) -> bool:
        """Return True if the run must stop to save in time. Called once per step, to time it.

        The end must stay near for SURE seconds and another step: in the step in which a suspended
        job is resumed, the step took long and the end that is known has moved.
        """
        now = time.monotonic()
        step, self._last = now - self._last, now
        if self.left() >= 3 * step + 2 * seconds + MARGIN:
            self._near_since = math.inf
        else:
            self._look.make_due()
            self._near_since = min(self._near_since, now)
            self.has_come |= self._near_since < now - SURE
        return self.has_come

    def left(self) -> float:
        """Return the seconds until the job ends; infinite if the end is not known."""
        if self._look.is_due():
            before = self._end
            found = JobEnd.read(self._directory)
            # An end before our start belongs to an earlier job; ours is then unknown.
            self._end = found.end if found and found.end >= self._began else math.inf
            if self._end != before:
                self._set_margin()
        return self._end - time.time()

    def begin_last_save(self) -> None:
        """Give the last save the time until `VERDICT`, or half of it if there is little."""
        self._look.make_due()
        self.left()
        self._set_margin()

    def is_late(self) -> bool:
        """Return True if the last save must be given up to leave time for the verdict."""
        return self.left() < self._margin

    def _set_margin(self) -> None:
        left = self._end - time.time()
        self._margin = min(VERDICT, left / 2) if left > LEAST else -math.inf
