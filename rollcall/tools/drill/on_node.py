"""`python -m rollcall.tools.drill.on_node WHAT LOGS NUMBER`: inject a fault on the node itself.

WHAT is kill-rank, hang or full-disk (NUMBER is a rank), or kill-node or slow-network (NUMBER is a
node). LOGS is the directory of the attempt's logs.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rollcall.launch.commands.stacks import ranks_of
from rollcall.system import hosts

DURATION = 5.0
"""Seconds for which a disk is full or a network is slow."""


def main(argv: Sequence[str]) -> int:
    """Inject the fault; return the exit code."""
    what, logs, number = argv[0], Path(argv[1]), int(argv[2])
    # A temporary fault must be undone even if the job, and with it this step, ends meanwhile.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    if what == "slow-network":
        if int(os.environ["SLURM_NODEID"]) == number:
            print("injected", flush=True)
            _slow_down()
        return 0
    if what == "kill-node":
        victim = next(map(_supervisor, ranks_of(logs / f"node-{number}")), None)
    else:
        ranks = (ranks_of(folder) for folder in logs.glob("node-*"))
        victim = next((pid for some in ranks for pid, rank in some.items() if rank == number), None)
    if victim is None:
        print(f"rollcall: error: no {what.partition('-')[2]} {number} runs here", file=sys.stderr)
        return 1
    print("injected", flush=True)  # first: the fault may end this step too
    if what == "full-disk":
        _forbid_writing(victim)
    else:
        os.kill(victim, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
    return 0


def _supervisor(rank: int) -> int | None:
    """Return the process id of the supervisor above a rank, None if the rank has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for parent in psutil.Process(rank).parents():
            if "supervise" in parent.cmdline():
                return parent.pid
    return None


def _slow_down() -> None:
    """Limit this host's network to 1 Mbit/s for a while."""
    head = hosts.of_step(os.environ)[0]
    device = ["dev", hosts.route(head).interface, "root"]
    limit = ["tbf", "rate", "1mbit", "burst", "32k", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", *device, *limit], check=True)
    time.sleep(DURATION)
    subprocess.run(["tc", "qdisc", "del", *device], check=True)


def _forbid_writing(pid: int) -> None:
    """Make every write to a file fail for a while, as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    time.sleep(DURATION)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
