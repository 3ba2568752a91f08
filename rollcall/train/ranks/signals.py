"""Signals that ask this process to stop."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# Ctrl-C of a person; and of Slurm, torchrun or another program.
PERSON = frozenset({signal.SIGINT})
SCHEDULER = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


class StopSignals:
    """Remembers the first signal that asked this process to stop, in `received`.

    A signal may arrive at any moment and more than once (Slurm repeats SIGTERM), so the handler
    does nothing else. A second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "StopSignals":
        for number in PERSON | SCHEDULER:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
