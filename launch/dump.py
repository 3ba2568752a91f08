"""`python -m launch.dump LOGS`: one node's part of `stacks`, every line with its rank before it.

A rank has a file in memory (train.ranks) to which its stacks go at a signal. We read it through
/proc, as the owner of the process may.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch.processes import Request
from launch.runs import log_directory

STACK_SIGNAL = signal.SIGRTMIN + 1
STACK_FILE = re.compile(r"/memfd:stack-of-rank-(\d+) ")
"""The signal and the file's name are those of train.ranks."""
PATIENCE = 5.0
"""Seconds that a rank has to answer."""


def main(argv: Sequence[str]) -> int:
    """Print the stacks of this Slurm step's node; return the exit code."""
    for rank, stack in dump(Path(argv[0]), int(os.environ["SLURM_NODEID"])).items():
        for line in stack.splitlines():  # srun mixes the nodes' output, but keeps short lines whole
            print(f"{rank}\t{line}")
    return 0


def dump(logs: Path, node: int) -> dict[int, str]:
    """The stacks of the ranks on one node that answer, by rank.

    Args:
        logs: the directory of the attempt's logs.
        node: number of the node, which must be this host.
    """
    files = _files((logs / f"node-{node}").resolve())
    sizes = {pid: path.stat().st_size for pid, (_, path) in files.items()}
    request = Request(STACK_SIGNAL)
    request.deliver(list(files))
    answers = {}
    end = time.monotonic() + PATIENCE
    for pid in sorted(request.reached):
        rank, path = files[pid]
        text = _read(path, sizes[pid], end)
        if text:
            answers[rank] = text
    return answers


def ranks_of(logs: Path) -> dict[int, int]:
    """The ranks on this host that write their logs into a node's directory, by process."""
    return {pid: rank for pid, (rank, _) in _files(logs.resolve()).items()}


def _files(logs: Path) -> dict[int, tuple[int, Path]]:
    """By process: rank and stack file of the ranks that write their logs there."""
    files, parents = {}, {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        first = log_directory(process.info["cmdline"] or [])  # of the first attempt's, perhaps
        if first is not None and first.parents[1] == logs.parents[1]:
            parents[process.pid] = process.info["ppid"]
            if (found := _file(process.pid, logs)) is not None:
                files[process.pid] = found
    # Data loader's workers are forked from ranks and have the file too; a rank's parent has none.
    return {pid: found for pid, found in files.items() if parents[pid] not in files}


def _file(pid: int, logs: Path) -> tuple[int, Path] | None:
    try:
        if Path(f"/proc/{pid}/fd/1").readlink().parent != logs:
            return None
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            match = STACK_FILE.match(str(entry.readlink()))
            if match:
                return int(match[1]), entry
    except OSError:  # it has ended meanwhile
        pass
    return None


def _read(path: Path, start: int, end: float) -> str:
    """What has been added to a file since it had `start` bytes, once it grows no more."""
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
