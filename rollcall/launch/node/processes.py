"""The processes of a node: the fork server, signals, children, orphans, stopped processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rollcall.system.process import LARGE_PAGES, NODE_LOST, die_with_parent
from rollcall.system.timer import RunningClock

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save and stop."""
PATIENCE = 10.0
"""Seconds that a rank has to install a handler before it gets SIGTERM or SIGINT anyway."""
START = 30.0
"""Seconds after its start from which a rank without a handler is not waited for."""
LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
"""True if the kernel lists the children of a process (CONFIG_PROC_CHILDREN)."""

MAX_BYTES = 1 << 16
"""Size limit of an answer of the fork server."""
KILLED = 128 + signal.SIGKILL


class SignalDelivery:
    """A signal that each rank must get once, as soon as it has a handler for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached: set[int] = set()
        self._seen: dict[int, float] = {}
        self._clock = RunningClock()

    def deliver(self, ranks: Mapping[int, float]) -> None:
        """Send the signal to the ranks, whose ages go by process id, that are ready for it."""
        # A program without handlers should end at SIGTERM and SIGINT, but not at USR1 and USR2.
        ends_anything = self.number in (signal.SIGTERM, signal.SIGINT)
        now = self._clock.read()
        for pid in set(ranks) - self.reached:
            if _is_in_mask(pid, "SigIgn:", self.number):  # too early: it would be lost
                continue
            waited = now - self._seen.setdefault(pid, now)
            overdue = waited > PATIENCE or ranks[pid] > START
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if (overdue and ends_anything) or _is_in_mask(pid, "SigCgt:", self.number):
                    os.kill(pid, self.number)
                    self.reached.add(pid)


def tell_node_lost(pids: Sequence[int]) -> bool:
    """Tell the ranks that train that a node is lost; return True."""
    for pid in pids:
        if _is_in_mask(pid, "SigBlk:", NODE_LOST):  # a thread of it waits for the signal
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, NODE_LOST)
    return True


def become_agent() -> None:
    """Prepare the fork server between fork and exec: it ignores signals meant for the ranks.

    On some clusters Slurm signals every process of a step, including this one during its imports.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    die_with_parent()


def _is_in_mask(pid: int, mask: str, number: int) -> bool:
    """Return True if a signal is in a mask of /proc/PID/status of a process that runs."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(mask):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def children(pid: int) -> list[int]:
    """List the direct children of a process, without a look at all processes of the host."""
    pids: list[int] = []
    ended = (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess)
    with contextlib.suppress(*ended):
        if not LISTS_CHILDREN:
            return [child.pid for child in psutil.Process(pid).children()]
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (names, not paths)
            with contextlib.suppress(*ended):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                pids += map(int, text.split())
    return pids


def end_orphans(keep: Sequence[int] = ()) -> None:
    """Kill what the ranks left behind, which are our children by now, but not `keep` and theirs."""
    while orphans := [child for child in children(os.getpid()) if child not in keep]:
        for child in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)


class ForkClient:
    """The supervisor's side of the fork server: each order gets an agent, which forks ranks."""

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start the server, which imports what all ranks need."""
        self.agent: int | None = None  # its process id, while it runs
        self._options, self._env = options, env
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._begin()

    @property
    def pids(self) -> list[int]:
        """The process ids of the server and the agent, if they exist."""
        server = self._process.pid if self._process else None
        return [pid for pid in (server, self.agent) if pid is not None]

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shared = {name: self._options[name] for name in self._options if name != "program"}
        options = json.dumps({**shared, "serve": theirs.fileno()})
        command = [sys.executable, "-u", "-m", "rollcall.launch.rank.agent", options]
        self._process = subprocess.Popen(
            [*command, *self._options["program"]],  # apart: Linux limits each word
            env={**LARGE_PAGES, **self._env},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C reaches the ranks once: through the supervisor
            preexec_fn=become_agent,
        )
        theirs.close()

    def start(self, order: Mapping[str, Any], port: socket.socket | None) -> None:
        """Start an agent, whose store listens on `port`, with these options instead of before."""
        if self._process is None:
            self._begin()
        assert self._control is not None
        descriptors = [port.fileno()] if port else []
        socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)

    def poll(self) -> int | None:
        """Return the exit code of the agent; None while it runs or is about to."""
        while True:
            if self._control is None:
                return KILLED
            try:
                answer = self._control.recv(MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                answer = b""
            if not answer:  # the server has ended, and the agent with it
                assert self._process is not None
                code = self._process.wait()
                self.kill()
                return code if code > 0 else 128 - code
            message = json.loads(answer)
            if "code" in message:
                self.agent = None
                return int(message["code"])
            self.agent = message["pid"]

    def kill_agent(self) -> None:
        """Kill the agent, and with it the ranks, whatever they are doing."""
        if self.agent is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.agent, signal.SIGKILL)
        else:
            self.kill()  # it still imports, or hangs

    def kill(self) -> None:
        """Kill the server; the next agent gets a new one."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._control.close()
            self._process.wait()
            self._process = self._control = self.agent = None
