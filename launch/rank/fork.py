"""Start ranks as forks of a process that has imported torch.

The ranks wait at a socket until this process has the store that `env://` uses (see store.py).
So before the fork there are only imports: no thread and no connection.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from rollcall import process
from rollcall.installation import training_words
from rollcall.launch.frameworks.framework import Store
from rollcall.launch.rank import surroundings
from rollcall.launch.rank.process import (
    RankError,
    exit_rank,
    record_end,
    record_failure,
    run_rank,
)
from rollcall.records.attempt import NodeState
from rollcall.timer import Every, RunningClock

HAS_TORCH = importlib.util.find_spec("torch") is not None
"""Whether this Python has torch. Without it, ranks get no store; their program needs none."""
if HAS_TORCH:
    from rollcall.launch.rank import store

MAX_BYTES = 1 << 20
"""Size limit of an attempt's options, as JSON; ranks may be forked before they are known."""
LEAVE_LOOK = 10.0
"""Seconds between two looks at the records of nodes whose ranks have not said that they end."""
LAST_WORDS = 2.0
"""Seconds that ranks have to end by themselves after another rank of the node has failed."""


def preload(options: argparse.Namespace) -> None:
    """Import what every rank of rollcall's training imports; another program may not expect it."""
    program = ("-m",) * options.module + (options.program, *options.arguments)
    words = training_words(program)
    if words is not None:
        _import_training(words)
        for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            # What torch's modules undo at exit, no rank needs: it takes 60 ms.
            info.atexit &= not (info.func.__module__ or "").startswith("torch")


def _import_training(words: Sequence[str]) -> None:
    from rollcall.config import ConfigError, arguments, parse
    from rollcall.train import main, models, training  # noqa: F401
    from rollcall.train.data import sets
    from rollcall.train.health import crosscheck

    crosscheck.code()
    with contextlib.suppress(ConfigError, ImportError):  # the ranks explain it
        _, config = parse(words)
        arguments.complete(config)
        for name in (*sets.slow_imports(config.data.name), *models.slow_imports(config.model.name)):
            importlib.import_module(name)


def start(options: argparse.Namespace, receive: Callable[[], None]) -> None:
    """Fork the ranks and wait for them; raise RankError if they do not start or one fails."""
    sys.stdout.flush()  # otherwise every rank would print what waits here
    gate, opener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pids = [_fork(options, number, gate, opener) for number in range(options.nproc_per_node)]
    gate.close()
    receive()
    Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    if HAS_TORCH:
        store.check_cuda(options.program)
    meeting = store.meet(options) if HAS_TORCH else None
    keys = 0 if meeting is None else meeting.num_keys()
    if meeting is None and options.port_fd is not None:
        os.close(options.port_fd)  # the program may want the port
    order = json.dumps(vars(options)).encode()
    with opener, contextlib.suppress(BrokenPipeError):  # all have died; _wait reports how
        for _ in pids:
            opener.send(order)
    _wait(pids, options)
    if meeting is not None:
        store.record_if_alone(meeting, keys, options)
    _leave(meeting, options)


def _leave(meeting: Store | None, options: argparse.Namespace) -> None:
    """Keep node 0 until the other nodes have ended: it hosts the store, and says how all ended."""
    folder, look = Path(options.log_dir).parent, Every(LEAVE_LOOK, at_once=False)
    with contextlib.suppress(RuntimeError, OSError):  # node 0 has ended already; a full disk
        if meeting is None:
            meeting = surroundings.Files(folder / "exchange", f"node-{options.node_rank}")
        left = meeting.add("left", 1)
        while options.node_rank == 0 and left < options.nnodes:
            if look.is_due() and _others_have_ended(folder, options.nnodes):
                return  # they were asked to stop, and do not come here
            time.sleep(0.02 if HAS_TORCH else 0.2)  # files lie on a shared disk
            left = meeting.add("left", 0)


def _others_have_ended(folder: Path, nodes: int) -> bool:
    """Whether all other nodes have written that their parts of this attempt ended in order.

    If one has failed or is lost, the supervisor of node 0 notices that and ends this process.
    """
    number = int(folder.name.rpartition("-")[2])
    parts = NodeState.read_all(folder.parents[1], attempt=number).values()
    ended = [one for one in parts if one.node and one.state in ("finished", "stopped")]
    return len(ended) == nodes - 1  # a record that is not visible yet says nothing


def environment(options: argparse.Namespace, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank."""
    rank, world_size = options.first_rank + local_rank, sum(options.ranks)
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "GROUP_RANK": options.node_rank,
        "GROUP_WORLD_SIZE": options.nnodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}


def _fork(
    options: argparse.Namespace, local_rank: int, gate: socket.socket, opener: socket.socket
) -> int:
    pid = os.fork()
    if pid == 0:
        process.die_with_parent()
        process.is_fork = True
        os.setsid()  # as under torchrun: a program may signal its whole group
        opener.close()
        if options.serve is not None:
            os.close(options.serve)
        order = gate.recv(MAX_BYTES)
        if not order:
            os._exit(1)  # the nodes have not met
        gate.close()
        vars(options).update(json.loads(order))
        os.environ.update(options.env)
        os.environ.update(environment(options, local_rank))
        if "numpy" in sys.modules:  # torch has imported it
            sys.modules["numpy"].random.seed()  # otherwise all ranks would draw the same numbers
        exit_rank(run_rank(options))
    return pid


def _wait(pids: Sequence[int], options: argparse.Namespace) -> None:
    """Wait for the ranks; after a failure only for LAST_WORDS seconds, then kill the others."""
    codes: dict[int, int] = {}  # by pid, in the order in which the ranks ended; -n for signal n
    deadline, clock = None, RunningClock()
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG if deadline else 0)
        if pid:
            codes[pid] = code = os.waitstatus_to_exitcode(status)
            rank = options.first_rank + pids.index(pid)
            record_end(options, rank, code)
            if code not in (0, os.EX_TEMPFAIL) and deadline is None:
                deadline = clock.read() + LAST_WORDS
                if options.serve is not None:
                    os.write(options.serve, b"!")  # the next ranks may be forked
            if code > 0 and code != os.EX_TEMPFAIL:  # it may have left by os._exit
                record_failure(options, f"rank-{rank}", code, "", rank, replace=False)
        elif deadline and clock.read() > deadline:
            for late in set(pids) - set(codes):
                os.kill(late, signal.SIGKILL)
            break
        else:
            time.sleep(0.002)
    failed = [pid for pid, code in codes.items() if code]
    if failed:
        # Ranks that lose a peer fail too, at once and loudly. A rank that a signal killed did not
        # fail because of a peer, so it comes first; a rank that was asked to stop comes last.
        first = min(failed, key=lambda pid: (codes[pid] > 0, codes[pid] == os.EX_TEMPFAIL))
        raise RankError.of_rank(options.first_rank + pids.index(first), codes[first], options)
