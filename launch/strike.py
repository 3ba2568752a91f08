"""`python -m launch.strike WHAT LOGS NUMBER`: one node's part of `drill`, on the node itself.

WHAT is kill-rank, hang or full-disk (NUMBER is a rank), or kill-node or slow-network (a node's).
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch.dump import ranks_of
from train import hosts

FOR = 5.0
"""Seconds for which a disk is full, or a network slow."""


def main(argv: Sequence[str]) -> int:
    """Do it; return the exit code."""
    what, logs, number = argv[0], Path(argv[1]), int(argv[2])
    # What lasts for a while is taken back also where the job, and with it this step, ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    if what == "slow-network":
        if int(os.environ["SLURM_NODEID"]) == number:
            print("struck", flush=True)
            _slow_down()
        return 0
    if what == "kill-node":
        ranks = ranks_of(logs / f"node-{number}")
        pid = next(iter(ranks), None)
        # A rank's parent is the agent, whose parent is the warm process, whose is the supervisor.
        victim = psutil.Process(pid).parents()[2].pid if pid else None
    else:
        found = (ranks_of(place) for place in logs.glob("node-*"))
        victim = next((pid for some in found for pid, rank in some.items() if rank == number), None)
    if victim is None:
        print(f"strike: error: there is no {what.partition('-')[2]} {number} here", file=sys.stderr)
        return 1
    print("struck", flush=True)  # first: what is killed may take this step along
    if what == "full-disk":
        _forbid_writing(victim)
    else:
        os.kill(victim, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
    return 0


def _slow_down() -> None:
    """Give this host's network 1 Mbit/s for a while."""
    head = hosts.expand(os.environ["SLURM_STEP_NODELIST"])[0]
    place = ["dev", hosts.route(head).interface, "root"]
    limit = ["tbf", "rate", "1mbit", "burst", "32k", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", *place, *limit], check=True)
    time.sleep(FOR)
    subprocess.run(["tc", "qdisc", "del", *place], check=True)


def _forbid_writing(pid: int) -> None:
    """Let every write to a file fail for a while, as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    time.sleep(FOR)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
