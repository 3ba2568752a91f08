"""A guard in front of a local TCP server without passwords: only this user's processes pass.

The guard listens at the server's port on 127.0.0.1, and asks the kernel whose process connects. The
server listens at another address, and the kernel drops what comes to it from anybody but the guard.
Where the kernel can do neither, as in some sandboxes, there is no guard.
"""

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import threading
import time
from pathlib import Path

OUTER, INNER, SOURCE = "127.0.0.1", "127.0.0.2", "127.1.{}.{}"
"""The addresses of guard and server, and those from which the guard connects to the server."""
BACKLOG = 4096
"""Connections that may wait until they are accepted; the kernel may allow fewer."""
SO_ATTACH_FILTER, ESTABLISHED = 26, "01"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""The kernel's tables of connections; the second one lists IPv6 sockets, such as torch's."""


def listen(outer: socket.socket) -> socket.socket:
    """Listen at a bound socket, guarded if it is local; return the socket for the server."""
    outer.listen(BACKLOG)
    host, port = outer.getsockname()[:2]
    if host != OUTER or not Path(TABLES[0]).exists():
        return outer
    holder = _bound("", 0)  # while it is open, no other user can bind or be given this port
    load, keep, drop = (0x28, 0, 0, 0), (0x06, 0, 0, 0xFFFF), (0x06, 0, 0, 0)
    lines = [load, (0x15, 0, 1, holder.getsockname()[1]), keep, drop]  # compares the source port
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    pointer = struct.pack("HP", len(lines), ctypes.addressof(program))
    server = socket.socket()
    server.bind((INNER, port))
    try:
        server.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)
    except OSError:  # a sandbox has no filters of sockets
        return outer
    server.listen(BACKLOG)
    threading.Thread(target=_admit, args=[outer, holder, (INNER, port)], daemon=True).start()
    return server


def _bound(host: str, port: int) -> socket.socket:
    result = socket.socket()
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # shared with this user alone
    result.bind((host, port))
    return result


def _admit(outer: socket.socket, holder: socket.socket, server: tuple[str, int]) -> None:
    for number in itertools.count():
        try:
            client, peer = outer.accept()
        except OSError:  # no more descriptors
            time.sleep(0.1)
            continue
        try:
            if _user(peer, outer.getsockname()) != os.getuid():
                raise PermissionError
            inner = _bound(SOURCE.format(*divmod(number % 2**16, 2**8)), holder.getsockname()[1])
            inner.connect(server)
            for pair in ((client, inner), (inner, client)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()
        except (OSError, RuntimeError):  # another user's; or no more threads, and torch tries again
            client.close()


def _user(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user whose process has the other end of a connection; None if nobody has it."""
    ends = [f"{struct.unpack('=I', socket.inet_aton(ip))[0]:08X}:{p:04X}" for ip, p in (peer, here)]
    lines = (line for name in TABLES for line in Path(name).read_text().splitlines())
    for _, local, remote, state, *_, user in (line.split()[:8] for line in lines):
        if [local[-13:], remote[-13:], state] == [*ends, ESTABLISHED]:
            return int(user)
    return None


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
