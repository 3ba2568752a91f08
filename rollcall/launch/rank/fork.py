"""Start ranks as forks of a process that has imported torch.

The ranks wait at a socket until this process has the store that torch's `env://` uses, at which the
parents of all nodes meet. So before the fork there are only imports: no thread and no connection.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import socket
import sys
import time
import weakref
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcall.cli.installation import USER_PROGRAM, training_words
from rollcall.launch.frameworks import TABLE, roles
from rollcall.launch.frameworks.framework import KeyValueStore
from rollcall.launch.rank import surroundings
from rollcall.launch.rank.process import (
    MAX_BYTES,
    RankError,
    exit_rank,
    receive,
    record_end,
    record_failure,
    run_rank,
)
from rollcall.launch.runs.decision import RESCUE, RestartFacts, decide, first_to_fail, has_failed
from rollcall.records.attempt import OUT_OF_MEMORY, NodeState, RanksAlone
from rollcall.system import guard, process
from rollcall.system.timer import Every, RunningClock

HAS_TORCH = importlib.util.find_spec("torch") is not None
"""True if this Python has torch. Without it, ranks get no store; their program needs none."""
if HAS_TORCH:
    import torch
    from torch.distributed import DistError, PrefixStore, TCPStore

    from rollcall.train.ranks import members

SERVERS_LOOK = 0.5
"""Seconds between two questions of a node with servers whether all other ranks have ended."""
SPARES = 3
"""Spare processes of a node that could take the places of lost ranks, one after the other."""
LEAVE_LOOK = 10.0
"""Seconds between two looks at the records of nodes whose ranks have not said that they end."""


def preload(options: Namespace) -> None:
    """Import once what every rank will import: all of rollcall's training, or torch's compiler."""
    words, options.spares = training_words(options.program), 0
    if HAS_TORCH and (words is not None or may_optimize(options.program)):
        from rollcall.train.torch_private import COMPILER

        importlib.import_module(COMPILER)
    if words is None:
        return  # another program may not expect more
    from rollcall.config import ConfigError, arguments, parse
    from rollcall.train import main, models, training  # noqa: F401
    from rollcall.train.data import sets
    from rollcall.train.health import crosscheck

    crosscheck.code()
    with contextlib.suppress(ConfigError, ImportError):  # the ranks explain it
        _, config = parse(words)
        arguments.complete(config)
        options.spares = SPARES if config.faults.on_lost_rank == "continue" else 0
        for name in (*sets.slow_imports(config.data.name), *models.slow_imports(config.model.name)):
            importlib.import_module(name)
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        # What torch's modules undo at exit, no rank needs: it takes 60 ms.
        info.atexit &= not (info.func.__module__ or "").startswith("torch")


def may_optimize(program: Sequence[str]) -> bool:
    """Return False for a script of Python's own modules and torch that names no optimizer."""
    *folder, script = program[2:4] if tuple(program[:2]) == USER_PROGRAM else program[:1]
    try:
        text = Path(*folder, script).read_text("utf-8", "replace")
    except OSError:  # a module, or a directory
        return True
    imported = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)
    return "optim" in text or not {*sys.stdlib_module_names, "torch", "numpy"}.issuperset(imported)


def start(options: Namespace) -> None:
    """Fork the ranks and wait for them; raise RankError if they do not start or one fails."""
    sys.stdout.flush()  # otherwise every rank would print what waits here
    gate, opener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pids = [_fork(options, number, gate, opener) for number in range(options.nproc_per_node)]
    spares = list[Any]()  # a process, and the socket at which it waits for an order
    for _ in range(options.spares):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spares.append((_fork(options, None, *pair, gate, opener), pair[1]))
        pair[0].close()
    gate.close()
    receive(options)
    Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    store = _meet(options) if HAS_TORCH else None
    keys = 0 if store is None else store.num_keys()
    if store is None and options.port_fd is not None:
        os.close(options.port_fd)  # the program may want the port
    order = json.dumps(vars(options)).encode()
    with opener, contextlib.suppress(BrokenPipeError):  # all have died; _wait reports how
        for _ in pids:
            opener.send(order)
    _wait(pids, options, store, spares)
    if store is not None:
        _record_if_alone(store, keys, options)
    _leave(store, options)


def _meet(options: Namespace) -> "PrefixStore":
    """Host or join the store where all nodes meet; RankError if they do not, or CUDA began."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        name = next(word for word in options.program if word != "-m")
        raise RankError(
            f"importing {name} has started CUDA, which a forked rank cannot use: move "
            "that below `if __name__ == '__main__'`, or use --start-method torchrun",
            2,
        )
    address = f"{options.master_addr}:{options.master_port}"
    is_host = options.node_rank == 0
    problem = f"cannot {'listen at' if is_host else 'reach node 0 at'} {address}"
    try:
        listener = None
        if is_host and options.port_fd is not None:
            listener = guard.listen(socket.socket(fileno=options.port_fd))
        server = TCPStore(
            options.master_addr,
            options.master_port,
            is_master=is_host,
            timeout=surroundings.JOIN_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach() if listener else None,
        )
        problem = f"not all of the {options.nnodes} nodes met at {address}"
        store = PrefixStore(f"rollcall/{options.run_id}", server)
        if store.add("nodes", 1) == options.nnodes:  # this is the last one
            store.set("all have met", "")
        store.get("all have met")
    except (DistError, OSError) as error:
        raise RankError(f"{problem}: {str(error).splitlines()[0]}", 1) from None
    return store


def _record_if_alone(store: "PrefixStore", keys: int, options: Namespace) -> None:
    """Record that no rank has used the store, which a process group does, since it had `keys`."""
    ranks = sum(options.ranks)
    may_know = options.node_rank == 0 and TABLE[options.framework].meets_at_master
    with contextlib.suppress(OSError):  # a full disk
        if may_know and ranks > 1 and store.num_keys() - store.check(["left"]) <= keys:
            RanksAlone(ranks).write(Path(options.log_dir))


def _leave(store: KeyValueStore | None, options: Namespace) -> None:
    """Keep node 0 until the other nodes have ended: it hosts the store, and says how all ended."""
    folder, look = Path(options.log_dir).parent, Every(LEAVE_LOOK, at_once=False)
    others = list(range(1, options.nnodes))
    with contextlib.suppress(RuntimeError, OSError):  # node 0 has ended already; a full disk
        store = store or _files(options)
        left = store.add("left", 1)
        while options.node_rank == 0 and left < options.nnodes:
            if look.is_due() and _have_ended(others, folder):
                return  # they were asked to stop, and do not come here
            time.sleep(0.02 if HAS_TORCH else 0.2)  # files lie on a shared disk
            left = store.add("left", 0)


def _files(options: Namespace) -> KeyValueStore:
    folder = Path(options.log_dir).parent / "exchange"
    return surroundings.Files(folder, f"node-{options.node_rank}")


def _have_ended(nodes: list[int], folder: Path) -> bool:
    """Forget nodes that ended in order; return True if all did. Supervisors notice failures."""
    number = int(folder.name.rpartition("-")[2])
    while nodes:  # a record that is not visible yet says nothing
        part = NodeState.read(folder.parents[1], attempt=number, node=nodes[-1])
        if part is None or part.state not in ("finished", "stopped"):
            return False
        nodes.pop()
    return True


def environment(options: Namespace, local_rank: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank."""
    rank, world_size = options.first_rank + local_rank, sum(options.ranks)
    named = options.roles or ["default"] * world_size
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "GROUP_RANK": options.node_rank,
        "GROUP_WORLD_SIZE": options.nnodes,
        "ROLE_NAME": named[rank],
        "ROLE_RANK": named[:rank].count(named[rank]),
        "ROLE_WORLD_SIZE": named.count(named[rank]),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if spares := vars(options).get("spares"):
        values[members.SPARES] = spares
    return {name: str(value) for name, value in values.items()}


def _fork(options: Namespace, local_rank: int | None, gate: socket.socket, *others: Any) -> int:
    pid = os.fork()
    if pid == 0:
        process.die_with_parent()
        process.is_fork = True
        os.setsid()  # as under torchrun: a program may signal its whole group
        for other in others:
            other.close()
        os.close(options.serve)
        order = gate.recv(MAX_BYTES)
        if not order:
            os._exit(1)  # the nodes have not met
        gate.close()
        vars(options).update(json.loads(order))
        os.environ.update(options.env)
        if local_rank is None:  # it was a spare process
            os.environ[members.REPLACES] = "1"
            local_rank = options.local_rank
        os.environ.update(environment(options, local_rank))
        if "numpy" in sys.modules:  # torch has imported it
            sys.modules["numpy"].random.seed()  # otherwise all ranks would draw the same numbers
        exit_rank(run_rank(options))
    return pid


def _wait(pids: list[int], options: Namespace, store: Any, spares: list[Any]) -> None:
    """Wait for the ranks; kill servers when all others have ended, all soon after a failure."""
    codes: dict[int, int] = {}  # by pid, in the order in which the ranks ended; -n for signal n
    servers = set[int]()  # those killed when all others had ended
    others = [f"ended {rank}" for rank in roles.awaited(options.roles)]
    shared, look = (store or _files(options)) if others else None, Every(SERVERS_LOOK)
    end, clock = math.inf, RunningClock()  # once a rank has failed, when the others are killed
    killed_before = process.memory_kills()
    log: Any = store and spares and PrefixStore(members.PREFIX, store.underlying_store)
    lost, until = None, 0.0  # the newest rank that was replaced, and its code; how long it counts
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, 0 if end == math.inf and not shared else os.WNOHANG)
        if pid in pids:  # and not a spare process
            codes[pid] = code = 0 if pid in servers else os.waitstatus_to_exitcode(status)
            rank = options.first_rank + pids.index(pid)
            if shared:
                shared.set(f"ended {rank}", "")
            is_killed = code < 0 and process.memory_kills() == killed_before and end == math.inf
            may_go_on = is_killed and log and spares and members.lose(log, rank, sum(options.ranks))
            facts = RestartFacts(has_failed(code), replaceable=bool(may_go_on))
            rule = decide("ranks run" if end == math.inf else "ranks end", "rank ended", facts)
            if rule.action == "replace":
                (spare, order), index = spares.pop(), pids.index(pid)
                with contextlib.suppress(OSError):  # the spare process has died, too: see below
                    order.send(json.dumps({**vars(options), "local_rank": index}).encode())
                pids[index] = spare
                del codes[pid]
                lost, until = (rank, code), clock.read() + members.PATIENCE
                print(f"rank {rank} ended by signal {-code}; the others continue", file=sys.stderr)
                continue
            if lost and has_failed(code) and clock.read() < until:
                record_end(options, *lost)  # the others did not continue: it is the cause
                lost = None
            with contextlib.suppress(RuntimeError):  # node 0, which has the store, has ended
                if log:  # too late to replace another one
                    log.set(members.OVER, "")
            record_end(options, rank, code)
            if rule.action == "fork the next ranks":
                end = clock.read() + (rule.grace or 0)
                os.write(options.serve, b"!")
            if code > 0 and has_failed(code):  # it may have left by os._exit
                record_failure(options, f"rank-{rank}", code, "", rank, replace=False)
        elif pid:
            spares = [spare for spare in spares if spare[0] != pid]
        elif clock.read() > end:
            remaining = set(pids) - set(codes)
            saves = clock.read() < end + RESCUE and any(map(process.rescues, remaining))
            facts = RestartFacts(rescuing=saves)
            if decide("ranks end", "time is up", facts).action == "wait":
                time.sleep(0.02)
                continue
            for pid in remaining:
                os.kill(pid, signal.SIGKILL)
            break
        elif shared and look.is_due() and shared.check(others):
            servers = set(pids) - set(codes)
            for late in servers:
                os.kill(late, signal.SIGKILL)
        else:
            time.sleep(0.02 if shared else 0.002)
    if any(codes.values()):
        first = first_to_fail(codes)
        lacks_memory = codes[first] == -signal.SIGKILL and process.memory_kills() > killed_before
        rank, why = options.first_rank + pids.index(first), OUT_OF_MEMORY if lacks_memory else ""
        raise RankError.of_rank(rank, codes[first], options, why)
