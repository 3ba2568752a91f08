"""Sample Python's stacks, in the collapsed form that https://www.speedscope.app draws."""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLE_EVERY = 0.002
"""Seconds between two samples."""


class Flames:
    """A thread that counts the Python stacks of the thread that made it."""

    def __init__(self) -> None:
        self._target = threading.get_ident()
        self._stacks: Counter[str] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY):
            frame: FrameType | None = sys._current_frames().get(self._target)
            names = []
            while frame:
                code = frame.f_code
                names.append(f"{code.co_qualname} ({Path(code.co_filename).name})")
                frame = frame.f_back
            self._stacks[";".join(reversed(names))] += 1

    def end(self) -> str:
        """End the sampling; return a line for each stack, with the number of its samples."""
        self._ended.set()
        self._thread.join()
        return "".join(f"{stack} {count}\n" for stack, count in self._stacks.items())
