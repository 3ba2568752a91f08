"""What is a run doing, and how did it end? Follows a job's output until the job is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from train.run import RunDir, read_lines

LOOK = 0.5
"""Seconds between two looks at the output."""


class Output:
    """The files that a job writes its output to, shown from their beginning as they grow."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._positions = dict.fromkeys(paths, 0)

    def show(self) -> None:
        """Print what has been added since the last time."""
        for path, position in self._positions.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    text = file.read()
                self._positions[path] += len(text)
                sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def follow(output: Output, is_over: Callable[[], bool]) -> None:
    """Show a job's output until the job is over."""
    while not is_over():
        output.show()
        time.sleep(LOOK)
    output.show()


def exit_code(run: RunDir, job_id: str) -> int | None:
    """How the newest attempt in this job ended; None if nothing says so."""
    code = None
    for line in read_lines(run.job / "attempts.jsonl"):
        if line["job"] == job_id:
            code = line["exit_code"] if line["event"] == "ended" else None
    return code
