"""Start a node's ranks again and again without importing torch again.

For every order of the supervisor, the fork server forks an agent, which starts the ranks of one
attempt. It reports the agent's process id and, at the end, its exit code.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rollcall.process import die_with_parent

MAX_BYTES = 1 << 20
"""Size limit of an order: a command line as JSON."""


def run_fork_server(descriptor: int, run_agent: Callable[[Sequence[str]], int]) -> NoReturn:
    """Fork an agent for each command line that arrives, until the supervisor has ended.

    A message at the `descriptor` of a socket may carry another socket, the one of the port.
    """
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, 1)
        if not message:
            os._exit(0)
        words = json.loads(message)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            control.close()
            code = run_agent([*(f"--port-fd={number}" for number in descriptors), *words])
            sys.stderr.flush()
            os._exit(code)
        for number in descriptors:
            os.close(number)
        control.send(json.dumps({"pid": pid}).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.send(json.dumps({"code": code if code >= 0 else 128 - code}).encode())
        # The supervisor waits for SIGCHLD, which the kernel sends for its own children only.
        os.kill(os.getppid(), signal.SIGCHLD)
