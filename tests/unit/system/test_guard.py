"""A local server without passwords is open to its own user alone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading

import pytest

from rollcall.system import guard

NOBODY = 65534
ASK = "exec 3<>/dev/tcp/127.0.0.1/{} && echo question >&3 && timeout 20 cat <&3"


def serve(server: socket.socket) -> None:
    """Answer every client, like a server without passwords."""
    while True:
        client, _ = server.accept()
        client.sendall(b"answer")
        client.close()


@pytest.fixture
def port() -> int:
    """Start a server behind the guard; return its port."""
    outer = socket.socket()
    outer.bind(("127.0.0.1", 0))
    server = guard.listen(outer)
    threading.Thread(target=serve, args=[server], daemon=True).start()
    return int(outer.getsockname()[1])


def test_the_same_user_is_answered(port: int) -> None:
    for _ in range(20):
        done = subprocess.run(["bash", "-c", ASK.format(port)], capture_output=True, check=False)
        assert done.stdout == b"answer"


def test_a_socket_for_ipv6_is_answered_as_well(port: int) -> None:
    with socket.socket(socket.AF_INET6) as client:  # torch's are of this kind
        client.connect(("::ffff:127.0.0.1", port))
        assert client.recv(6) == b"answer"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(port: int) -> None:
    assert shutil.which("setpriv")
    user = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "bash", "-c"]
    hello = subprocess.run([*user, "echo hello"], capture_output=True, check=True)
    done = subprocess.run([*user, ASK.format(port)], capture_output=True, check=False)
    assert hello.stdout == b"hello\n" and done.stdout == b""


def test_the_way_around_the_guard_is_closed(port: int) -> None:
    with pytest.raises(TimeoutError):
        socket.create_connection((guard.INNER, port), timeout=1.5)
    near = guard.SOURCE.format(0, 77)  # an address of the guard's own, but another port
    with socket.socket() as client, pytest.raises(TimeoutError):
        client.bind((near, 0))
        client.settimeout(1.5)
        client.connect((guard.INNER, port))


def test_a_server_on_a_network_has_no_guard() -> None:
    with socket.socket() as outer:
        outer.bind(("127.0.0.3", 0))  # any address but the one of local runs
        assert guard.listen(outer) is outer


def test_without_filters_of_sockets_there_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SO_ATTACH_FILTER", 9999)
    with socket.socket() as outer:
        outer.bind(("127.0.0.1", 0))
        assert guard.listen(outer) is outer
