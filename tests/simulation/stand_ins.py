"""What Python's modules do for the threads of a simulation: `time`, `os`, `open`, `socket`.

The launcher's code runs unmodified. While a simulation is installed, the functions that touch the
clock, files, processes and sockets look at the thread that calls them. A thread of a simulated
process gets the simulated answer, every other thread the real one.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import signal
import socket as real_socket
import subprocess
import tempfile
import threading as real_threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulated_disk import FIRST, ROOT, File
from simulated_hosts import Cluster, Connection, Listener
from simulated_slurm import Child, Environment, Slurm
from simulated_time import Task, current

from rollcall.launch.batch import batch
from rollcall.launch.node import batch_process, heartbeat, monitor, pulse, rendezvous
from rollcall.system.hosts import Route

real_close = os.close
EPOCH = 1_700_000_000.0
"""The time of day at which simulations begin."""


class Event:
    """A `threading.Event` of simulated threads."""

    def __init__(self, cluster: Cluster) -> None:
        self._clock, self._is_set = cluster.clock, False
        self._waiters: list[Task] = []

    def set(self) -> None:
        self._is_set = True
        for task in self._waiters:
            self._clock.wake(task)
        self._waiters.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiters.append(self._clock.task())
            self._clock.park(timeout)
        return self._is_set


class Thread:
    """A `threading.Thread` of a simulated process."""

    def __init__(
        self, cluster: Cluster, target: Callable[..., object], args: Any = (), daemon: bool = True
    ) -> None:
        del daemon
        self._clock, self._body = cluster.clock, lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._clock.spawn(self._clock.task().process, self._body)

    def join(self) -> None:
        assert self._task is not None
        self._clock.join(self._task)


@contextlib.contextmanager
def installed(cluster: Cluster, slurm: Slurm) -> Iterator[None]:
    """Let the threads of this cluster's processes see the cluster instead of this machine."""
    clock, disk = cluster.clock, cluster.disk
    real_open, real_temporary = io.open, tempfile.TemporaryFile

    def close(number: int) -> None:
        """Close a file; Python may close one whose simulation is over."""
        disk.close(number) if number >= FIRST else real_close(number)

    os.close = close  # type: ignore[assignment] # and it stays

    def either(module: Any, name: str, simulated: Callable[..., Any], by: str = "path") -> Any:
        real = getattr(module, name)

        def choose(*args: Any, **named: Any) -> Any:
            if current() is None:
                return real(*args, **named)
            if by == "task":
                return simulated(*args, **named)
            first = args[0]
            if isinstance(first, int):
                is_ours = first >= FIRST
            else:
                first = os.fspath(first)
                is_ours = isinstance(first, str) and (first == ROOT or first[:5] == f"{ROOT}/")
                args = (first, *args[1:])
            if is_ours:
                if name in ("link", "replace", "rename"):
                    return simulated(first, os.fspath(args[1]))
                return simulated(*args) if name != "access" else simulated(first)
            if isinstance(first, str) and first.startswith("/proc/"):
                return cluster.proc(name, first, lambda: real(*args, **named))
            return real(*args, **named)

        return mock.patch.object(module, name, choose)

    def open_file(path: Any, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        number = path if isinstance(path, int) else disk.open(os.fspath(path), _flags(mode))
        file = File(disk, number)
        if buffering == 0:
            return file
        binary: Any = io.BufferedReader(file) if "r" in mode else io.BufferedWriter(file)
        return binary if "b" in mode else io.TextIOWrapper(binary)

    def open_either(path: Any, *args: Any, **named: Any) -> Any:
        if current() is not None:
            text = path if isinstance(path, int) else os.fspath(path)
            if isinstance(text, int) and text >= FIRST:
                return open_file(text, *args, **named)
            if isinstance(text, str) and text.startswith(f"{ROOT}/"):
                return open_file(text, *args, **named)
            if isinstance(text, str) and text.startswith("/proc/"):
                text = cluster.proc("open", text, lambda: None)
                if text is not None:
                    return io.StringIO(text)
        return real_open(path, *args, **named)

    def temporary(*args: Any, **named: Any) -> Any:
        if current() is None:
            return real_temporary(*args, **named)
        path = f"{named['dir']}/.tmp{cluster.random.getrandbits(32):x}"
        file = open_file(path, "wb", 0)
        disk.unlink(path)
        return file

    def waited(numbers: Any, seconds: float) -> int | None:
        return cluster.wait_for_signal(seconds, numbers)

    def silenced(_: int) -> None:
        raise AssertionError("a supervisor prints no more, though somebody reads it")

    def sigwait(numbers: Any) -> int:
        while (number := cluster.wait_for_signal(60.0, numbers)) is None:
            pass
        return number

    sockets = SimpleNamespace(
        AF_INET=real_socket.AF_INET,
        AF_INET6=real_socket.AF_INET6,
        SOCK_STREAM=real_socket.SOCK_STREAM,
        SHUT_RDWR=real_socket.SHUT_RDWR,
        socket=lambda *_: Listener(cluster),
        create_server=lambda address, **_: Listener(cluster).bind(address),
        create_connection=lambda address, timeout: Connection.open(cluster, address, timeout),
        gethostname=lambda: cluster.host().name,
    )
    threads = SimpleNamespace(
        Event=lambda: Event(cluster),
        Thread=lambda **named: Thread(cluster, **named),
        get_ident=real_threading.get_ident,
    )
    patches: list[Any] = [
        either(time, "monotonic", lambda: clock.now, "task"),
        either(time, "time", lambda: EPOCH + clock.now, "task"),
        either(time, "sleep", clock.sleep, "task"),
        either(os, "getpid", lambda: clock.task().process.pid, "task"),
        either(os, "urandom", cluster.random.randbytes, "task"),
        either(os, "kill", cluster.kill, "task"),
        either(os, "waitpid", lambda *_: (0, 0), "task"),
        *(either(os, name, getattr(disk, name)) for name in _OF_FILES),
        either(os, "rename", disk.replace),
        either(os, "remove", disk.unlink),
        either(os, "lstat", disk.stat),
        either(os, "readlink", disk.stat),
        mock.patch.object(io, "open", open_either),
        mock.patch.object(builtins, "open", open_either),
        mock.patch.object(tempfile, "TemporaryFile", temporary),
        mock.patch.object(pulse, "socket", sockets),
        mock.patch.object(rendezvous, "socket", sockets),
        mock.patch.object(pulse, "threading", threads),
        mock.patch.object(heartbeat, "threading", threads),
        mock.patch.object(pulse, "route", lambda _: Route(cluster.host().name, "eth0")),
        mock.patch.object(rendezvous, "route", lambda *_: Route(cluster.host().name, "eth0")),
        mock.patch("rollcall.launch.node.supervise.route", lambda *_: Route("", "eth0")),
        mock.patch.object(monitor, "wait_for_signal", waited),
        mock.patch.object(batch, "wait_for_signal", waited),
        mock.patch.object(batch_process, "socket", sockets),
        mock.patch.object(batch_process, "wait_for_signal", waited),
        mock.patch.object(batch_process, "redirect_output", os.close),
        mock.patch.object(monitor, "redirect_output", silenced),
        mock.patch.object(os, "environ", Environment(cluster, os.environ)),
        either(signal, "sigwait", sigwait, "task"),
        either(subprocess, "run", slurm.run, "task"),
        either(subprocess, "Popen", lambda words, env=None, **_: Child(slurm, words, env), "task"),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


_OF_FILES = (
    *("open", "fsync", "posix_fadvise", "pread", "pwrite", "write", "link", "replace"),
    *("unlink", "mkdir", "listdir", "scandir", "stat", "fstat", "access"),
)


def _flags(mode: str) -> int:
    if "a" in mode:
        return os.O_RDWR | os.O_CREAT | os.O_APPEND
    return os.O_RDONLY if "r" in mode else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
