"""The agent: start the ranks of one node and wait for them, as a replacement for torchrun.

torchrun starts one interpreter per rank, and each of them imports torch. Here one process imports
torch and forks the ranks. That is safe only while it has started neither CUDA nor a thread, so
before the fork it does nothing but import. `--start-method torchrun` is for scripts that use CUDA
at import. The exit code is the first failed rank's (128 + n if signal n killed it), otherwise 0.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rollcall.launch.rank.process import MAX_BYTES, RankError, record_failure, run_rank
from rollcall.launch.rank.surroundings import RANK_OPTIONS
from rollcall.records.attempt import AGENT, LOST_PEER, RankFailure
from rollcall.system import hosts, process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LOOK = 1.0
"""Seconds between two looks at whether the supervisor is stopped."""
Start = Callable[[Namespace], None]


def main() -> NoReturn:
    """Start the ranks of each order until the supervisor has ended."""
    if RANK_OPTIONS in os.environ:  # torchrun has started this rank
        sys.exit(run_rank(Namespace(**json.loads(os.environ.pop(RANK_OPTIONS)))))
    # An order adds what differs by attempt.
    options = Namespace(**json.loads(sys.argv[1]), program=sys.argv[2:])
    options.nproc_per_node = options.ranks[options.node_rank]
    options.first_rank = sum(options.ranks[: options.node_rank])
    # Before torch is imported: its thread pool reads this once.
    threads = max(1, hosts.usable_cpus() // options.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # For torch's C++ code, as with env/bin/torchrun: it warns of every host name without DNS.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The supervisor forwards signals to the ranks itself, so this process must survive them.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    variables = set(os.environ)
    if options.start_method == "fork":
        gc.disable()  # collections would take a quarter of the time that imports take
        from rollcall.launch.rank.fork import preload, start  # imports torch

        preload(options)
        # Later collections leave out what was imported: to look at an object is to write to it,
        # which copies the page that ranks share.
        gc.freeze()
        gc.enable()
    else:
        from rollcall.launch.rank.torchrun import start  # imports torch

    for name in set(os.environ) - variables:  # an import has set it; ranks must not inherit it
        del os.environ[name]
    run_fork_server(options, start)


def _run(options: Namespace, start: Start) -> int:
    """Be the agent of one attempt; return the exit code."""
    try:
        start(options)
    except RankError as error:
        if error.code != os.EX_TEMPFAIL:  # a rank that was asked to stop has said so itself
            if not _is_victim(options, error):
                print(f"node {options.node_rank}: {error}", file=sys.stderr)
            record_failure(options, AGENT, error.code, str(error), error.rank)
        return error.code
    return 0


def _is_victim(options: Namespace, error: RankError) -> bool:
    """Return True if the rank says that it only lost others: the head names the culprit."""
    report = RankFailure.read(Path(options.log_dir), who=f"rank-{error.rank}")
    return report is not None and LOST_PEER.search(report.error) is not None


def run_fork_server(options: Namespace, start: Start) -> NoReturn:
    """Fork an agent for each order that arrives, until the supervisor has ended.

    So torch is imported once for all attempts, and while the supervisor prepares the first one. A
    message at the socket `options.serve` may carry another socket, the one of the port. The answers
    are the agent's process id and, at the end, its exit code. Once a rank has failed, the next
    agent forks its ranks while the others end; all wait for the next order.
    """
    control = socket.socket(fileno=options.serve)
    agent: tuple[int, socket.socket] | None = None
    while True:
        _await(control)
        message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, 1)
        if not message:
            os._exit(0)
        pid, orders = agent or _fork_agent(options, start, descriptors)
        with contextlib.suppress(OSError):  # it was killed, as its exit code will say
            socket.send_fds(orders, [message], descriptors)
        for number in descriptors:
            os.close(number)
        control.send(json.dumps({"pid": pid}).encode())
        has_failed = b""
        with orders, contextlib.suppress(OSError):
            _await(orders)
            has_failed = orders.recv(1)  # nothing if the agent ends without a failed rank
        agent = _fork_agent(options, start) if has_failed else None
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.send(json.dumps({"code": code if code >= 0 else 128 - code}).encode())
        # The supervisor waits for SIGCHLD, which the kernel sends for its own children only.
        os.kill(os.getppid(), signal.SIGCHLD)


def _await(link: socket.socket) -> None:
    """Wait until something arrives; wake the supervisor if somebody stops it but not us."""
    stopped = process.StoppedProcesses()
    while not select.select([link], [], [], LOOK)[0]:
        for pid in stopped.find([os.getppid()]):
            os.kill(pid, signal.SIGCONT)


def _fork_agent(
    options: Namespace, start: Start, inherited: Sequence[int] = ()
) -> tuple[int, socket.socket]:
    """Fork an agent; return its process id and the socket at which it waits for an order."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        process.die_with_parent()
        process.is_fork = True
        orders.close()
        for number in (options.serve, *inherited):
            os.close(number)
        options.serve = theirs.detach()
        code = _run(options, start)
        sys.stderr.flush()
        os._exit(code)
    theirs.close()
    return pid, orders


if __name__ == "__main__":
    main()
