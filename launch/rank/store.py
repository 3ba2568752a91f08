"""The store that torch's `env://` uses: the parents of the ranks open it and meet there."""

import argparse
import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it: seconds, paid here once instead of per rank
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rollcall.launch.frameworks import TABLE
from rollcall.launch.rank.process import RankError
from rollcall.records.attempt import RanksAlone

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long nodes wait for each other; the slowest file system must import torch in this time."""
BACKLOG = 4096
"""Connections that may wait until the store accepts them; the kernel may allow fewer."""


def check_cuda(program: str) -> None:
    """Raise RankError if an import has started CUDA, which a forked rank could not use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RankError(
            f"importing {program} has started CUDA, which a forked rank cannot use: move that "
            "below `if __name__ == '__main__'`, or use --start-method torchrun",
            2,
        )


def meet(options: argparse.Namespace) -> Store:
    """Host the store on node 0, connect to it on the others, and wait until all nodes have met.

    The supervisors have compared their numbers of ranks; RankError is raised if they do not meet.
    """
    place = f"{options.master_addr}:{options.master_port}"
    is_host = options.node_rank == 0
    problem = f"cannot listen at {place}" if is_host else f"cannot reach node 0 at {place}"
    try:
        if is_host and options.port_fd is not None:
            with socket.socket(fileno=os.dup(options.port_fd)) as holder:
                holder.listen(BACKLOG)
        server = TCPStore(
            options.master_addr,
            options.master_port,
            is_master=is_host,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=options.port_fd if is_host else None,
        )
        problem = f"not all of the {options.nnodes} nodes met at {place}"
        store = PrefixStore(f"rollcall/{options.run_id}", server)
        if store.add("nodes", 1) == options.nnodes:  # this is the last one
            store.set("all have met", "")
        store.get("all have met")
    except (DistError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RankError(f"{problem}: {reason}", 1) from None
    return store


def record_if_alone(store: Store, keys: int, options: argparse.Namespace) -> None:
    """Record that no rank has used the store, which a process group does, since it had `keys`."""
    ranks = sum(options.ranks)
    may_know = options.node_rank == 0 and TABLE[options.framework].meets_at_master
    with contextlib.suppress(OSError):  # a full disk
        if may_know and ranks > 1 and store.num_keys() - store.check(["left"]) <= keys:
            RanksAlone(ranks).write(Path(options.log_dir))
