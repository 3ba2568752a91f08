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
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from train import hosts
from train.ranks import be_rank, tell
from train.warm import serve

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks that the command line asks for and wait for them; return the exit code."""
    options = parser().parse_args(argv)
    if options.start_method == "none":
        be_rank(options)
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
    from train import elastic  # now, because it imports torch

    if options.serve is not None:
        if options.start_method == "fork":
            elastic.warm(options)
        serve(options.serve, main)
    start = elastic.fork if options.start_method == "fork" else elastic.torchrun
    try:
        start(options)
    except elastic.AgentError as error:
        if error.code != os.EX_TEMPFAIL:  # stopped in order: the ranks have said so
            print(f"node {options.node_rank}: {error}", file=sys.stderr)
            tell(options, "agent", error.code, str(error), rank=error.rank)
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
    result.add_argument("--serve", type=int, help="a socket from which agents' words come")
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


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # there is nothing to save here, and taking torch apart costs half a second
