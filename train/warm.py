"""Start a node's ranks again without importing torch again: an agent per attempt, forked from here.

This process has imported torch and does nothing else, so a fork of it is as good as new. For every
message of the supervisor it forks an agent, tells its process id, and at its end its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from train.orphans import die_with_parent

LONGEST = 1 << 20
"""Bytes of a message: a command line as JSON."""


def serve(descriptor: int, agent: Callable[[Sequence[str]], int]) -> NoReturn:
    """Fork an agent for each command line that comes, with the socket of its port; never returns.

    Args:
        descriptor: of a socket to the supervisor; we end when it is closed.
        agent: what a fork does with the command line; returns its exit code.
    """
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST, 1)
        if not message:
            os._exit(0)
        words = json.loads(message)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            control.close()
            code = agent([*(f"--port-fd={number}" for number in descriptors), *words])
            sys.stderr.flush()
            os._exit(code)
        for number in descriptors:
            os.close(number)
        control.send(json.dumps({"pid": pid}).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.send(json.dumps({"code": code if code >= 0 else 128 - code}).encode())
        os.kill(os.getppid(), signal.SIGCHLD)  # as if the agent were the supervisor's own child
