"""Start the ranks of one node: torch's elastic agent, with ranks forked from one warm process.

A drop-in for torchrun with a static rendezvous:

    python -m train.agent --nnodes 2 --node-rank 0 --nproc-per-node 4 \\
        --master-addr 10.0.0.1 --master-port 29400 --run-id 17.0 --log-dir logs -m train digits

torchrun starts one interpreter per rank, and each imports torch for itself. Here one process
imports torch and forks, so that the ranks begin where a plain process is after seconds of imports.
A fork is safe only as long as the parent has started neither CUDA nor a thread pool, so the parent
does nothing but import. `--start-method torchrun` gives every rank an interpreter of its own, for
scripts that a fork does not suit.

Exit code: that of the first rank that failed, 128 + n if signal n ended it; 0 if all succeeded.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from train import hosts
from train.config import ConfigError, parse
from train.run import write_atomic

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long the agents wait for each other; the slowest file system must import torch meanwhile."""
DATA_IMPORTS = {"digits": "sklearn.datasets", "mnist": "torchvision.datasets"}
"""What loading the data imports, late and for seconds."""
PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGRTMIN + 1
"""At this signal a rank writes the stacks of its threads to its file in memory named STACK_FILE."""
STACK_FILE = "stack-of-rank-{}"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class AgentError(Exception):
    """The ranks of this node could not be started, or one of them failed."""

    def __init__(self, message: str, code: int, rank: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks that the command line asks for and wait for them; return the exit code."""
    options = parser().parse_args(argv)
    if options.start_method == "none":
        _rank(options)
    world_size = options.nnodes * options.nproc_per_node
    if options.expect_world not in (None, world_size):
        print(
            f"agent of node {options.node_rank}: {options.nnodes} nodes with "
            f"{options.nproc_per_node} ranks each make a world of {world_size}, but "
            f"{options.expect_world} ranks are expected",
            file=sys.stderr,
        )
        return 2
    Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    # Before torch is imported: its thread pool reads this once.
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, hosts.usable_cpus() // options.nproc_per_node))
    )
    # The supervisor passes signals on to the ranks. torch's agent would end them on SIGTERM after
    # 30 s, also in the middle of a checkpoint, and die of SIGUSR2 itself.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        if options.start_method == "fork":
            _fork(options)
        else:
            _torchrun(options)
    except AgentError as error:
        if error.code != os.EX_TEMPFAIL:  # stopped in order: the ranks have said so
            print(f"node {options.node_rank}: {error}", file=sys.stderr)
            _tell(options, "agent", error.code, str(error), rank=error.rank)
        return error.code
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line: torchrun's words where it has them."""
    result = argparse.ArgumentParser(prog="python -m train.agent", allow_abbrev=False)
    result.add_argument("--nnodes", type=int, default=1)
    result.add_argument("--node-rank", type=int, default=0)
    result.add_argument("--nproc-per-node", type=int, default=1)
    result.add_argument("--master-addr", default="127.0.0.1", help="address of node 0")
    result.add_argument("--master-port", type=int, required=True)
    result.add_argument("--port-fd", type=int, help="a bound socket that holds the port free")
    result.add_argument("--run-id", required=True, help="the same on all nodes, new per attempt")
    result.add_argument("--log-dir", required=True, help="gets rank-<n>.log of every rank")
    result.add_argument("--expect-world", type=int, help="refuse any other number of ranks")
    result.add_argument(
        "--start-method",
        choices=("fork", "torchrun", "none"),
        default="fork",
        help="fork: one import for all ranks; torchrun: an interpreter per rank; none: this "
        "process is a rank already (so torchrun starts it)",
    )
    result.add_argument("-m", "--module", action="store_true", help="the program is a module")
    result.add_argument("program")
    result.add_argument("arguments", nargs=argparse.REMAINDER)
    return result


def _fork(options: argparse.Namespace) -> None:
    import torch
    import torch._dynamo  # the first optimizer imports it: seconds, once here instead of per rank
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class OwnLogs(LogsSpecs):
        """Leaves output to the ranks, which open their own files."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            none = dict.fromkeys(envs, "")
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            return LogsDest(dict(none), dict(none), {}, {}, dict(none))

        @property
        def root_log_dir(self) -> str:
            return str(options.log_dir)

    class Agent(LocalElasticAgent):
        """torch's agent, whose forked ranks end as processes do: with an exit code."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            start = time.monotonic()
            result: RunResult = super()._monitor_workers(worker_group)
            context: Any = self._pcontext  # a MultiprocessContext; _pc holds its processes
            # torch waits for a value that each rank returns. Ours exit, so that a rank that
            # leaves by os._exit(0) counts too; without sentinels all have exited with 0.
            if result.state == WorkerState.HEALTHY and not context._pc.sentinels:
                values = {worker.global_rank: None for worker in worker_group.workers}
                return RunResult(WorkerState.SUCCEEDED, return_values=values)
            if result.is_failed():
                raise _blame(
                    [process.exitcode for process in context._pc.processes],
                    min(result.failures) % options.nproc_per_node,
                    time.monotonic() - start,
                    options,
                )
            return result

    _warm(options)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise AgentError(
            f"importing {options.program} has started CUDA, which a forked rank cannot use: "
            "move that below `if __name__ == '__main__'`, or use --start-method torchrun",
            2,
        )
    gc.collect()
    gc.freeze()  # the garbage collector would write to, and so copy, every page shared by fork
    logging.disable(logging.CRITICAL)  # torch's report of a failure is 40 lines; ours is one
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    spec = _spec(options)
    agent = Agent(spec, OwnLogs(), start_method="fork")
    _release_port(options)
    _run(agent.run, options)
    _leave(spec, options)


def _spec(options: argparse.Namespace) -> WorkerSpec:
    # Not through LaunchConfig: it counts GPUs through the CUDA driver, and a process forked from
    # one that has done that cannot use them (2.11, 2.15).
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    host = f"[{options.master_addr}]" if ":" in options.master_addr else options.master_addr
    rendezvous = RendezvousParameters(
        backend="static",
        endpoint=f"{host}:{options.master_port}",
        run_id=options.run_id,
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        rank=options.node_rank,
        timeout=int(JOIN_TIMEOUT.total_seconds()),
    )
    return WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=_rank,
        args=(options,),
        rdzv_handler=registry.get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


def _leave(spec: WorkerSpec, options: argparse.Namespace) -> None:
    """Leave after the others: node 0 holds the store in which they wait for each other."""
    store = spec.rdzv_handler.next_rendezvous().store  # the one that is there
    end = time.monotonic() + 10
    left = store.add("left", 1)
    while options.node_rank == 0 and left < options.nnodes and time.monotonic() < end:
        time.sleep(0.02)
        left = store.add("left", 0)


def _torchrun(options: argparse.Namespace) -> None:
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)
    _release_port(options)
    launch = parse_args(  # type: ignore[no-untyped-call]
        [
            "--rdzv-backend=static",
            f"--rdzv-id={options.run_id}",
            f"--rdzv-conf=timeout={int(JOIN_TIMEOUT.total_seconds())}",
            f"--nnodes={options.nnodes}",
            f"--node-rank={options.node_rank}",
            f"--nproc-per-node={options.nproc_per_node}",
            f"--master-addr={options.master_addr}",
            f"--master-port={options.master_port}",
            "--signals-to-handle=SIGQUIT",
            "-m",
            "train.agent",
            "--start-method=none",
            f"--nnodes={options.nnodes}",
            f"--nproc-per-node={options.nproc_per_node}",
            f"--master-port={options.master_port}",
            f"--run-id={options.run_id}",
            f"--log-dir={options.log_dir}",
            *(["-m"] if options.module else []),
            options.program,
            *options.arguments,
        ]
    )
    _run(lambda: run(launch), options)  # type: ignore[no-untyped-call]


def _run(start: Callable[[], object], options: argparse.Namespace) -> None:
    """Run torch's agent to its end; whatever goes wrong becomes one AgentError."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    place = f"{options.master_addr}:{options.master_port}"
    try:
        start()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise AgentError(*_describe(rank, failure.exitcode, options)) from None
    except DistError as error:
        reason = str(error).splitlines()[0]
        if options.node_rank == 0:
            message = f"the {options.nnodes} nodes did not meet here, at {place}: {reason}"
        else:
            message = f"node 0 was not met at {place}: {reason}"
        raise AgentError(message, 1) from None


def _blame(
    exit_codes: Sequence[int | None], first: int, seconds: float, options: argparse.Namespace
) -> AgentError:
    """The error of a failed node, naming the rank that was first.

    Args:
        exit_codes: of the local ranks; negative for signals.
        first: local rank whose end torch noticed first.
        seconds: how long torch took to end the others; after 30 it sends SIGKILL.
        options: the agent's.
    """
    # Ranks that lose a peer fail too, at once and loudly. A rank that a signal ended had no peer to
    # blame; SIGTERM is torch's own way of ending the rest.
    silent = [signal.SIGTERM] if seconds < 30 else [signal.SIGTERM, signal.SIGKILL]
    for local_rank, code in enumerate(exit_codes):
        if code is not None and code < 0 and -code not in silent:
            first = local_rank
            break
    rank = options.node_rank * options.nproc_per_node + first
    return AgentError(*_describe(rank, exit_codes[first] or 1, options))


def _describe(rank: int, code: int, options: argparse.Namespace) -> tuple[str, int, int]:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed, exit code {code}"
    message = f"rank {rank} {how}; its output: {options.log_dir}/rank-{rank}.log"
    return message, 128 - code if code < 0 else code, rank


def _tell(options: argparse.Namespace, who: str, code: int, error: str, rank: int | None) -> None:
    """Write beside the logs how a rank failed, and when, for whoever looks for the first one.

    Args:
        options: the agent's.
        who: names the file: the rank, or the agent for what its ranks cannot tell themselves.
        code: exit code; 128 + n if signal n ended the rank.
        error: type and message of the exception, if it was one.
        rank: the rank that failed; None if none has started.
    """
    failure = {"time": time.time(), "host": socket.gethostname(), "rank": rank}
    text = json.dumps({**failure, "exit_code": code, "error": error}) + "\n"
    with contextlib.suppress(OSError):  # the failure itself matters more
        write_atomic(Path(options.log_dir) / f"{who}.failed.json", text)


def _release_port(options: argparse.Namespace) -> None:
    if options.port_fd is not None:
        os.close(options.port_fd)


def _rank(options: argparse.Namespace) -> NoReturn:
    """Be one rank: open its log, restore its signals, run the program as __main__, exit."""
    rank = os.environ["RANK"]
    log = os.open(
        Path(options.log_dir) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
    )
    # The descriptors themselves: what C++ prints goes there too.
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.disable(logging.NOTSET)
    # A rank whose agent is gone has nobody to end it (torch's choice is SIGINT, which it handles).
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # USR1 and USR2 stay ignored until the program has handlers: they must not end it before.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = str(options.nnodes * options.nproc_per_node)
    if os.environ["WORLD_SIZE"] != expected:
        print(
            f"rank {rank} found a world of {os.environ['WORLD_SIZE']} ranks, but {expected} are "
            "expected: the nodes were started with different numbers of ranks",
            file=sys.stderr,
        )
        code, error = 2, ""
    else:
        stacks = os.memfd_create(STACK_FILE.format(rank))  # no disk: that may be what a rank awaits
        faulthandler.register(STACK_SIGNAL, stacks)
        code, error = _run_program(options)
    if code not in (0, os.EX_TEMPFAIL):
        _tell(options, f"rank-{rank}", code, error, int(rank))
    if options.start_method == "fork":
        atexit._run_exitfuncs()  # multiprocessing leaves them out before Python 3.13
    # None, not 0: torch would keep a forked rank that exits with 0 (2.11, 2.15).
    raise SystemExit(code or None)


def _run_program(options: argparse.Namespace) -> tuple[int, str]:
    """Run the program as __main__; return its exit code and, if it raised, what."""
    sys.argv = [options.program, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.program).resolve().parent)
            runpy.run_path(options.program, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF, ""
        print(exit_.code, file=sys.stderr)
        return 1, str(exit_.code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "KeyboardInterrupt"
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # as the interpreter would; it may be the program's own
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _warm(options: argparse.Namespace) -> None:
    """Import what every rank of our own program will; a user's program might not expect it."""
    if not options.module or options.program != "train":
        return
    importlib.import_module("train.loop")
    try:
        _, config = parse(options.arguments)
    except ConfigError:
        return  # rank 0 explains it
    if config.data.name in DATA_IMPORTS:
        importlib.import_module(DATA_IMPORTS[config.data.name])


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # there is nothing to save here, and taking torch apart costs half a second
