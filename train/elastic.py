"""How does torch's own agent start ranks: forked from this process, or an interpreter each?"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: seconds, once here instead of per rank
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from train.config import ConfigError, parse
from train.ranks import be_rank

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long the agents wait for each other; the slowest file system must import torch meanwhile."""
BACKLOG = 4096
"""Connections that the store has not yet answered; the kernel may allow fewer."""
LAST_WORDS = 2.0
"""Seconds that ranks have to end by themselves when another one of the node has failed."""
DATA_IMPORTS = {"digits": "sklearn.datasets", "mnist": "torchvision.datasets"}
"""What loading the data imports, late and for seconds."""


class AgentError(Exception):
    """The ranks of this node could not be started, or one of them failed."""

    def __init__(self, message: str, code: int, rank: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank


class OwnLogs(LogsSpecs):
    """Leaves output to the ranks, which open their own files in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:  # noqa: D102 - torch's
        none = dict.fromkeys(envs, "")
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(dict(none), dict(none), {}, {}, dict(none))

    @property
    def root_log_dir(self) -> str:  # noqa: D102 - torch's
        return self._directory


class Agent(LocalElasticAgent):
    """torch's agent, whose forked ranks end as processes do: with an exit code."""

    def __init__(self, spec: WorkerSpec, options: argparse.Namespace) -> None:
        super().__init__(spec, OwnLogs(options.log_dir), start_method="fork")
        self._options = options

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext  # a MultiprocessContext; _pc holds its processes
        if context is not None:
            codes = {process.exitcode for process in context._pc.processes}
            if codes - {None, 0, os.EX_TEMPFAIL}:
                raise _blame(_end(context._pc.processes), self._options)
            if None in codes and os.EX_TEMPFAIL in codes:  # they leave in order
                return RunResult(WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        # torch waits for a value that each rank returns. Ours exit, so that a rank that
        # leaves by os._exit(0) counts too; without sentinels all have exited with 0.
        if result.state == WorkerState.HEALTHY and not context._pc.sentinels:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=values)
        if result.is_failed():  # since we have looked
            raise _blame(_end(context._pc.processes), self._options)
        return result


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous; its store listens on the socket that we were given.

    torch's own would listen on all addresses of the host.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(
            options.master_addr,
            options.master_port,
            options.node_rank,
            options.nnodes,
            options.run_id,
            int(JOIN_TIMEOUT.total_seconds()),
        )
        self._listener: int | None = options.port_fd

    def next_rendezvous(self) -> RendezvousInfo:  # noqa: D102 - torch's
        if self._listener is not None and self._store is None:
            with socket.socket(fileno=os.dup(self._listener)) as holder:
                holder.listen(BACKLOG)
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                multi_tenant=True,
                master_listen_fd=self._listener,
            )
        return super().next_rendezvous()


def fork(options: argparse.Namespace) -> None:
    """Start the ranks as forks of this process and wait for them.

    Raises:
        AgentError: they could not be started, or one has failed.
    """
    warm(options)
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
    agent = Agent(spec, options)
    _run(agent.run, options)
    _leave(spec, options)


def _spec(options: argparse.Namespace) -> WorkerSpec:
    # Not through LaunchConfig: it counts GPUs through the CUDA driver, and a process forked from
    # one that has done that cannot use them (2.11, 2.15).
    return WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=be_rank,
        args=(options,),
        rdzv_handler=Rendezvous(options),
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


def torchrun(options: argparse.Namespace) -> None:
    """Let torch start an interpreter per rank and wait for them.

    Raises:
        AgentError: they could not be started, or one has failed.
    """
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)
    if options.port_fd is not None:
        os.close(options.port_fd)  # torchrun binds the port itself
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


def _end(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Let the ranks that have lost one say so, then end them.

    torch would ask them with SIGTERM, at which ours finish their step, and wait for 30 s.

    Returns:
        Their exit codes, negative for signals; None for those that had to be ended.
    """
    end = time.monotonic() + LAST_WORDS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _blame(exit_codes: Sequence[int | None], options: argparse.Namespace) -> AgentError:
    """The error of a failed node, naming the rank that was first."""
    failed = [local_rank for local_rank, code in enumerate(exit_codes) if code]
    # Ranks that lose a peer fail too, at once and loudly. A rank that a signal ended had no peer to
    # blame.
    first = next((rank for rank in failed if (exit_codes[rank] or 0) < 0), min(failed, default=0))
    rank = options.node_rank * options.nproc_per_node + first
    return AgentError(*_describe(rank, exit_codes[first] or 1, options))


def _describe(rank: int, code: int, options: argparse.Namespace) -> tuple[str, int, int]:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed, exit code {code}"
    message = f"rank {rank} {how}; its output: {options.log_dir}/rank-{rank}.log"
    return message, 128 - code if code < 0 else code, rank


def warm(options: argparse.Namespace) -> None:
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
