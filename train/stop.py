"""Who asked us to stop? Signals only raise a flag here; the loop makes all ranks agree on it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

PERSON = frozenset({signal.SIGINT})
SCHEDULER = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


class StopSignals:
    """Remembers the first signal that asked this rank to stop.

    Signals can come twice (Slurm repeats SIGTERM) and at any moment, so the handler does nothing
    but remember; a second Ctrl-C ends the process at once.

    Attributes:
        received: the signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopSignals:
        for number in PERSON | SCHEDULER:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def by_person(self) -> bool:
        """Whether a person asked, at a keyboard."""
        return self.received in PERSON

    @property
    def by_scheduler(self) -> bool:
        """Whether Slurm, torchrun or another program asked."""
        return self.received in SCHEDULER

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
