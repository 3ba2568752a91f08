"""Start ranks with torchrun: one interpreter per rank."""

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from rollcall.launch.rank.process import RankError, record_failure

JOIN_TIMEOUT = 600
"""Seconds that nodes wait for each other."""


def start(options: argparse.Namespace, receive: Callable[[], None]) -> None:
    """Let torchrun start the ranks and wait for them; raise RankError if one fails."""
    receive()
    Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)  # torch reports a failure in 40 lines, rollcall in one
    if options.port_fd is not None:
        os.close(options.port_fd)  # torchrun binds the port itself
    both = [f"--nnodes={options.nnodes}", f"--master-port={options.master_port}"]
    words = [
        *(*both, f"--nproc-per-node={options.nproc_per_node}"),
        f"--node-rank={options.node_rank}",
        f"--master-addr={options.master_addr}",
        *("--rdzv-backend=static", f"--rdzv-id={options.run_id}"),
        *(f"--rdzv-conf=timeout={JOIN_TIMEOUT}", "--signals-to-handle=SIGQUIT"),
        *("-m", "rollcall.launch.rank.agent", "--start-method=none", *both),
        f"--nproc-per-node={','.join(map(str, options.ranks))}",
        *(f"--run-id={options.run_id}", f"--log-dir={options.log_dir}"),
        f"--framework={options.framework}",
        *(["-m"] if options.module else []),
        *(options.program, *options.arguments),
    ]
    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code > 0 and code != os.EX_TEMPFAIL:  # it may have left by os._exit
                record_failure(options, f"rank-{rank}", code, "", rank, replace=False)
        # See fork._wait.
        first = min(codes, key=lambda rank: (codes[rank] > 0, codes[rank] == os.EX_TEMPFAIL))
        raise RankError.of_rank(first, codes[first], options) from None
    except DistError as error:
        place = f"{options.master_addr}:{options.master_port}"
        reason = str(error).splitlines()[0]
        message = f"not all of the {options.nnodes} nodes met at {place}: {reason}"
        raise RankError(message, 1) from None
