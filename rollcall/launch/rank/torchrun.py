"""Start ranks with torchrun: one interpreter per rank."""

import json
import logging
import os
from argparse import Namespace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from rollcall.launch.rank.process import RankError, receive, record_failure
from rollcall.launch.rank.surroundings import JOIN_TIMEOUT, RANK_OPTIONS
from rollcall.launch.runs.decision import first_to_fail, has_failed


def start(options: Namespace) -> None:
    """Let torchrun start the ranks and wait for them; raise RankError if one fails."""
    receive(options)
    Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)  # torch reports a failure in 40 lines, rollcall in one
    if options.port_fd is not None:
        os.close(options.port_fd)  # torchrun binds the port itself
    os.environ[RANK_OPTIONS] = json.dumps(vars(options))
    words = [
        *(f"--nnodes={options.nnodes}", f"--nproc-per-node={options.nproc_per_node}"),
        *(f"--node-rank={options.node_rank}", f"--rdzv-id={options.run_id}"),
        *(f"--master-addr={options.master_addr}", f"--master-port={options.master_port}"),
        *("--rdzv-backend=static", f"--rdzv-conf=timeout={JOIN_TIMEOUT.seconds}"),
        *("--signals-to-handle=SIGQUIT", "-m", "rollcall.launch.rank.agent"),
        *options.program,  # for `ps`
    ]
    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code > 0 and has_failed(code):  # it may have left by os._exit
                record_failure(options, f"rank-{rank}", code, "", rank, replace=False)
        first = first_to_fail(codes)
        raise RankError.of_rank(first, codes[first], options) from None
    except DistError as error:
        address = f"{options.master_addr}:{options.master_port}"
        reason = str(error).splitlines()[0]
        message = f"not all of the {options.nnodes} nodes met at {address}: {reason}"
        raise RankError(message, 1) from None
