"""The supervisor's side of the fork server, the process from which a node's ranks are forked."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rollcall.launch.node import processes
from rollcall.process import LARGE_PAGES

MAX_BYTES = 1 << 16
"""Size limit of an answer."""
KILLED = 128 + signal.SIGKILL


class ForkClient:
    """Starts the fork server if needed. For each order, it forks an agent, which forks ranks."""

    def __init__(self) -> None:
        self.agent: int | None = None  # its process id, while it runs
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id; None if it is not running."""
        return self._process.pid if self._process else None

    @property
    def pids(self) -> list[int]:
        """The process ids of the server and the agent, if they exist."""
        return [pid for pid in (self.pid, self.agent) if pid is not None]

    def begin(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server, which imports what all ranks need; `ps` shows the words, too."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-m", "rollcall.launch.rank.agent"]
        self._process = subprocess.Popen(
            [*command, f"--serve={theirs.fileno()}", *words],
            env={**LARGE_PAGES, **env},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C reaches the ranks once: through the supervisor
            preexec_fn=processes.become_agent,
        )
        theirs.close()

    def start(
        self, words: Sequence[str], env: Mapping[str, str], port: socket.socket | None
    ) -> None:
        """Start an agent, whose store listens on `port`, with this environment for the ranks."""
        if self._process is None:
            self.begin(words, env)
        assert self._control is not None
        descriptors = [port.fileno()] if port else []
        new = {name: value for name, value in env.items() if os.environ.get(name) != value}
        order = json.dumps({"words": [*words], "env": new}).encode()
        socket.send_fds(self._control, [order], descriptors)

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
