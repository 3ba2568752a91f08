"""Is another node's supervisor still there? Each has a file with a count that must go on.

No clocks are compared: a node is silent when its count has not changed for a while by the clock of
the one who watches. The head watches all, all watch the head, so that files read grow with nodes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from launch.node import Node
from train.run import RunDir

EVERY = 0.5
"""Seconds between two counts, and between two looks."""
SILENCE = 5.0
"""Seconds without a new count after which a node counts as lost."""
BEGIN = 300.0
"""Seconds that a node has until its first count."""
LEFT = 60.0
"""Seconds after which a node that has ended counts as lost if we still go on: all end together."""
OVER = b"over    "


class Heartbeat:
    """This node's count, and what it knows of the others'."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._place = run.job / "heartbeats" / node.key
        self._place.mkdir(parents=True, exist_ok=True)
        self._own = self._place / f"node-{node.number}"
        self._watched = [
            number for number in (range(1, node.count) if node.is_head else [0]) if node.count > 1
        ]
        self._count = 0
        self._last = 0.0
        self._seen = dict.fromkeys(self._watched, (b"", time.monotonic()))

    def beat(self) -> int | None:
        """Count, if it is time to, and look at the others; the node that is silent, if one is."""
        now = time.monotonic()
        if now - self._last < EVERY or not self._watched:
            return None
        self._count += 1
        write(self._own, b"%08d" % self._count)
        if now - self._last > SILENCE / 2:
            # We were held up ourselves, by a suspended job or a slow disk: then so may others.
            self._seen = dict.fromkeys(self._watched, (b"", now))
        self._last = now
        for number in self._watched:
            with contextlib.suppress(OSError):  # it has not begun
                found = (self._place / f"node-{number}").read_bytes()
                if found != self._seen[number][0]:
                    self._seen[number] = (found, now)
        late = (
            number
            for number, (count, since) in self._seen.items()
            if now - since > {OVER: LEFT, b"": BEGIN}.get(count, SILENCE)
        )
        return next(late, None)

    def end(self) -> None:
        """Say that nothing more is to be expected."""
        if self._watched:
            write(self._own, OVER)


def write(path: Path, count: bytes) -> None:
    """Put a count into a file; in place, since on NFS a renamed file can be seen late elsewhere."""
    with contextlib.suppress(OSError):  # a full disk: no reason to end a run
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, count, 0)
        finally:
            os.close(descriptor)
