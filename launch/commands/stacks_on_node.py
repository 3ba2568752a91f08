"""`python -m rollcall.launch.commands.stacks_on_node LOGS`: one node's part of `stacks`.

At a signal, a rank writes its stacks to a file in memory (see rollcall.launch.rank.process). The
owner of the process can read that file through /proc. Each line is printed with its rank before it.
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rollcall.launch.node.processes import SignalDelivery
from rollcall.launch.rank.process import STACK_FILE, STACK_SIGNAL

AGENT = "rollcall.launch.rank.agent"
"""A word of the command line of all ranks: most are forks of their starter."""
IN_MEMORY = re.compile("/memfd:" + STACK_FILE.format(r"(\d+)") + " ")
"""The link to a rank's stack file in /proc."""
PATIENCE = 5.0
"""Seconds that a rank has to answer."""


def main(argv: Sequence[str]) -> int:
    """Print the stacks of this Slurm step's node; return the exit code."""
    for rank, stack in dump(Path(argv[0]), int(os.environ["SLURM_NODEID"])).items():
        for line in stack.splitlines():  # srun mixes the nodes' output, but keeps short lines whole
            print(f"{rank}\t{line}")
    return 0


def dump(logs: Path, node: int) -> dict[int, str]:
    """Return the stacks of the ranks on one node, which must be this host, that answer, by rank."""
    files = _files((logs / f"node-{node}").resolve())
    sizes = {pid: path.stat().st_size for pid, (_, path) in files.items()}
    request = SignalDelivery(STACK_SIGNAL)
    request.deliver(dict.fromkeys(files, 0.0))
    answers = {}
    end = time.monotonic() + PATIENCE
    for pid in sorted(request.reached):
        rank, path = files[pid]
        text = _read(path, sizes[pid], end)
        if text:
            answers[rank] = text
    return answers


def ranks_of(logs: Path) -> dict[int, int]:
    """Return the ranks on this host that write their logs into this directory, by process id."""
    return {pid: rank for pid, (rank, _) in _files(logs.resolve()).items()}


def _files(logs: Path) -> dict[int, tuple[int, Path]]:
    """Return rank and stack file of the ranks that write their logs there, by process id."""
    files, parents = {}, {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if AGENT in (process.info["cmdline"] or []):
            parents[process.pid] = process.info["ppid"]
            if (found := _file(process.pid, logs)) is not None:
                files[process.pid] = found
    # Data workers are forked from ranks and have the file too; a rank's parent has none.
    return {pid: found for pid, found in files.items() if parents[pid] not in files}


def _file(pid: int, logs: Path) -> tuple[int, Path] | None:
    try:
        if Path(f"/proc/{pid}/fd/1").readlink().parent != logs:
            return None
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = IN_MEMORY.match(str(entry.readlink()))
            if match:
                return int(match[1]), entry
    except OSError:  # it has just ended
        pass
    return None


def _read(path: Path, start: int, end: float) -> str:
    """Return what was added to a file after its first `start` bytes, once it stops growing."""
    seen = start
    while time.monotonic() < end:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            break
        if size > start and size == seen:
            return path.read_bytes()[start:].decode(errors="replace")
        seen = size
        time.sleep(0.05)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
