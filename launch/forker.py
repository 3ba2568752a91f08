"""Who starts this node's ranks? A process that stays warm from attempt to attempt, or a new one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launch import processes

LONGEST = 1 << 16
"""Bytes of an answer."""
KILLED = 128 + signal.SIGKILL


class Forker:
    """The process from which this node's agents, and so its ranks, are forked (train.warm).

    Attributes:
        agent: process id of the agent; None before it has begun and when it has ended.
    """

    def __init__(self) -> None:
        self.agent: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None if there is none."""
        return self._process.pid if self._process else None

    @property
    def pids(self) -> list[int]:
        """This process and the agent."""
        return [pid for pid in (self.pid, self.agent) if pid is not None]

    def start(
        self, words: Sequence[str], env: Mapping[str, str], port: socket.socket | None
    ) -> None:
        """Have an agent started.

        Args:
            words: the agent's command line.
            env: its environment; that of the first agent counts for all.
            port: a bound socket that the agent takes over.
        """
        if self._process is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # The words are here too: to see what a process is for, and what it must import.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "train.agent", f"--serve={theirs.fileno()}", *words],
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C reaches the ranks once: through us
                preexec_fn=processes.become_agent,
            )
            theirs.close()
        assert self._control is not None
        descriptors = [port.fileno()] if port else []
        socket.send_fds(self._control, [json.dumps(list(words)).encode()], descriptors)

    def poll(self) -> int | None:
        """The exit code of the agent, None while it runs or is about to."""
        while True:
            if self._control is None:
                return KILLED
            try:
                answer = self._control.recv(LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                answer = b""
            if not answer:  # the process itself has ended, and with it the agent
                self.kill()
                continue
            told = json.loads(answer)
            if "code" in told:
                self.agent = None
                return int(told["code"])
            self.agent = told["pid"]

    def kill_agent(self) -> None:
        """End the agent, and with it the ranks, whatever they do."""
        if self.agent is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.agent, signal.SIGKILL)
        else:
            self.kill()  # it imports, or hangs

    def kill(self) -> None:
        """End the process; the next agent gets a new one."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._control.close()
            self._process.wait()
            self._process = self._control = self.agent = None
