"""Sample what Python does, for a flame graph: https://www.speedscope.app opens the file."""

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType

INTERVAL = 0.002
"""Seconds between two samples."""


class Flames:
    """A thread that notes the Python stack of the thread that made it."""

    def __init__(self) -> None:
        self._target = threading.get_ident()
        self._samples: list[tuple[list[tuple[str, str, int]], float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._ended.wait(INTERVAL):
            frame: FrameType | None = sys._current_frames().get(self._target)
            stack: list[tuple[str, str, int]] = []
            while frame:
                code = frame.f_code
                stack.append((code.co_qualname, code.co_filename, code.co_firstlineno))
                frame = frame.f_back
            now = time.perf_counter()
            self._samples.append((stack[::-1], now - before))
            before = now

    def write(self, path: Path, name: str) -> None:
        """End the samples and write them in the format of speedscope."""
        self._ended.set()
        self._thread.join()
        frames: dict[tuple[str, str, int], int] = {}
        stacks = [
            [frames.setdefault(one, len(frames)) for one in stack] for stack, _ in self._samples
        ]
        weights = [round(seconds, 6) for _, seconds in self._samples]
        known = [{"name": what, "file": file, "line": line} for what, file, line in frames]
        profile = {
            "type": "sampled",
            "name": name,
            "unit": "seconds",
            "startValue": 0,
            "endValue": round(sum(weights), 6),
            "samples": stacks,
            "weights": weights,
        }
        schema = "https://www.speedscope.app/file-format-schema.json"
        path.write_text(
            json.dumps({"$schema": schema, "shared": {"frames": known}, "profiles": [profile]})
        )
