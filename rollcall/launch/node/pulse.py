"""Signs of life of a supervisor or a batch process: a count in a file, and answers over TCP.

A thread each gives them and does nothing else, so a main thread that waits for a slow disk is not
taken for dead. The count needs the file system; the answer needs only memory and the network.
"""

import contextlib
import hmac
import os
import socket
import threading
import time
from typing import Literal

from rollcall.records.attempt import COUNT_BYTES, Heartbeat
from rollcall.system.hosts import HostError, route

Opinion = Literal["alive", "frozen", "refused", "unreachable"]
"""The result of a question to a node: it answers; it takes the connection and is silent, as a
stopped process does; its host says that nobody listens; nothing is heard of its host."""
TIMEOUT = 2.0
"""Seconds that a connection, and an answer, may take."""
QUESTION_BYTES = 16
BACKLOG = 1024
"""Questions that may wait for a stopped process; a longer queue looks like a dead host."""
OVER = b"over"
"""Stands in place of a count once the writer has ended in order."""


class Pulse:
    """The heartbeat of this process, and its answers to the question whether it is alive."""

    def __init__(self, heartbeat: Heartbeat, seconds: float, peer: str | None = None) -> None:
        """Begin to count every `seconds`, and to answer where `peer`, another host, reaches us."""
        self._heartbeat, self._seconds, self._address = heartbeat, seconds, ""
        self._mark, self._count = b"0", 0
        self._change, self._is_over = threading.Event(), False
        self._server = None if peer is None else _listen(peer)
        if self._server is not None:
            host, port = self._server.getsockname()[:2]
            key = os.urandom(16)  # in the file, which is the owner's alone: no other can answer
            self._address = f" {host} {port} {key.hex()}"
            threading.Thread(target=self._answer, args=[self._server, key], daemon=True).start()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._write()
        self._thread.start()

    def mark(self, mark: bytes) -> bool:
        """Show this first byte before the count, at once; return True if it is another one."""
        is_new, self._mark = mark != self._mark, mark
        if is_new:
            self._change.set()
        return is_new

    def end(self, is_over: bool = True) -> None:
        """Count and answer no more; unless the process might as well be dead, write that."""
        self._is_over = True
        self._change.set()
        self._thread.join()
        if is_over:
            self._heartbeat.write((self._mark + OVER).ljust(COUNT_BYTES))
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            self._server.close()

    def _write(self) -> None:
        self._count += 1
        self._heartbeat.write(self._mark + b"%07d" % (self._count % 10**7), self._address)

    def _beat(self) -> None:
        while not self._is_over:
            self._change.wait(self._seconds)
            self._change.clear()
            if not self._is_over:
                self._write()

    def _answer(self, server: socket.socket, key: bytes) -> None:
        while not self._is_over:
            try:
                asker, _ = server.accept()
            except OSError:  # no more descriptors, or the end
                time.sleep(0.1)
                continue
            with asker, contextlib.suppress(OSError):  # it has gone, or asks nothing
                asker.settimeout(TIMEOUT / 4)
                asker.sendall(hmac.digest(key, asker.recv(QUESTION_BYTES), "sha256"))


def ask(address: str) -> Opinion:
    """Ask the process that answers at an address of a heartbeat whether it is alive."""
    question = os.urandom(QUESTION_BYTES)
    try:
        host, port, key = address.split()
        expected = hmac.digest(bytes.fromhex(key), question, "sha256")
        peer = socket.create_connection((host, int(port)), TIMEOUT)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ValueError):
        return "unreachable"
    with peer:
        try:
            peer.sendall(question)
            answer = peer.recv(2 * len(expected))
        except TimeoutError:
            return "frozen"
        except OSError:
            return "unreachable"
    if not answer:  # this process may have been too slow to ask; a dead one refuses the next time
        return "unreachable"
    # Another process may have taken the port.
    return "alive" if hmac.compare_digest(answer, expected) else "refused"


def _listen(peer: str) -> socket.socket | None:
    """Listen at the address of this host that the other one reaches; None if there is none."""
    with contextlib.suppress(OSError, HostError):
        address = route(peer).address if peer else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=BACKLOG)
    return None
