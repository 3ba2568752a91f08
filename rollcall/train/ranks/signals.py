"""Signals that ask this process to stop, and the one that says that a node is lost."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rollcall.system.process import NODE_LOST

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# Ctrl-C of a person; and of Slurm, torchrun, another program or a terminal that is closed.
PERSON = frozenset({signal.SIGINT})
SCHEDULER = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})


class StopSignals:
    """Remembers the first signal that asked this process to stop, in `received`.

    A signal may arrive at any moment and more than once (Slurm repeats SIGTERM), so the handler
    does nothing else. A second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "StopSignals":
        # nohup ignores it, and a program may have its own use of it.
        kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL else ()
        for number in (PERSON | SCHEDULER).difference(kept):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


@contextlib.contextmanager
def end_at_once(text: str) -> Iterator[None]:
    """End this process with a text at a signal, where C code waits or imports modules.

    Python's handlers run when it returns, and what they raise it may swallow.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)

    def read() -> None:
        while number := os.read(reader, 1):
            if number[0] in PERSON | SCHEDULER:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, text.encode())
                os._exit(os.EX_TEMPFAIL)
        os.close(reader)

    threading.Thread(target=read, daemon=True, name="stop").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def await_lost_node() -> None:
    """Close this process's connections when a node is lost, which cannot close its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [NODE_LOST])  # in all threads, if called before them
    threading.Thread(target=_await_lost_node, daemon=True, name="node lost").start()


def _await_lost_node() -> None:
    signal.sigwait([NODE_LOST])
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names, not paths)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            is_network = link.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                link.shutdown(socket.SHUT_RDWR)
