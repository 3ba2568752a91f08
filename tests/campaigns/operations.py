"""Count the operations that load a shared file system.

    PYTHONPATH=. python tests/campaigns/operations.py

Two supervisors run on this machine, as on two nodes, under strace. First one waits for the head.
Then both run a script that only sleeps. The table shows, for each node and second, the operations
on files in the run directory that a file server sees: open, close, stat, list, create, rename and
so on. Reading and writing open files is not counted. The exit code is 1 above the goals.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollcall.cli.installation import command
from rollcall.tools.bench import turns

GOALS = {"waiting for the head": 5.0, "running quietly": 1.0}
"""Operations per node and second, at most."""
CALLS = "%file,close,getdents64,fsync"
"""System calls that strace shows, also those on open files."""
SETTLE = 3.0
"""Seconds from the first log to quiet running: the other node's first heartbeat is found."""
TIMEOUT = 300.0
"""Seconds that the ranks have to start."""


class Operation(NamedTuple):
    """A system call on a file in the run directory."""

    time: float  # seconds since 1970
    call: str
    path: str  # relative to the run directory


def main(argv: Sequence[str]) -> int:
    """Count and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase", metavar="S")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="K")
    parser.add_argument("--paths", action="store_true", help="also show which files they are on")
    options = parser.parse_args(argv)
    phases = observe(options.seconds, options.nproc_per_node)
    rows = [["per node and second", "operations", "goal"]]
    for name, found in phases.items():
        rows.append([name, f"{len(found) / options.seconds:.2f}", f"at most {GOALS[name]:g}"])
        paths = Counter(f"  {each.call} {each.path}" for each in found) if options.paths else {}
        rows += [[path, f"{n / options.seconds:.2f}", ""] for path, n in sorted(paths.items())]
    turns.show("on the run directory", rows)
    return int(any(len(found) / options.seconds > GOALS[name] for name, found in phases.items()))


def observe(seconds: float, ranks: int) -> dict[str, list[Operation]]:
    """Return the operations of one node in each phase; of the busier one, if both take part.

    Raises:
        BenchError: strace is missing or may not trace, or no rank starts.
    """
    if shutil.which("strace") is None:
        raise turns.BenchError("strace is not on PATH: apt-get install strace")
    with tempfile.TemporaryDirectory(prefix="rollcall-metadata-") as name:
        folder = Path(name).resolve()
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            nodes.append(_start(folder, 1, ranks))
            began = _wait_for(folder, "run/job/heartbeats/*/node-1", nodes)
            time.sleep(seconds)
            nodes.append(_start(folder, 0, ranks))
            for rank in (0, ranks):
                _wait_for(folder, f"run/logs/*/*/rank-{rank}.log", nodes)
            time.sleep(SETTLE)
            quiet = time.time()
            time.sleep(seconds)
        finally:
            (folder / "stop").touch()
            for node in nodes:
                node.wait()
        both = [_read(folder, number) for number in (0, 1)]
    waiting = [each for each in both[1] if began <= each.time < began + seconds]
    running = [[each for each in some if quiet <= each.time < quiet + seconds] for some in both]
    return dict(zip(GOALS, (waiting, max(running, key=len)), strict=True))


def _start(folder: Path, number: int, ranks: int) -> subprocess.Popen[bytes]:
    """Start the supervisor of a node under strace."""
    script = f"import os, time\nwhile not os.path.exists({str(folder / 'stop')!r}): time.sleep(0.2)"
    (folder / "script.py").write_text(script)
    # As submitit starts nodes on this machine; the job is this process.
    place = {"JOB_ID": os.getpid(), "GLOBALID": number, "NTASKS": 2}
    env = {**os.environ, **{f"SUBMITIT_LOCAL_{name}": str(of) for name, of in place.items()}}
    words = [f"--run-dir={folder / 'run'}", f"--nproc-per-node={ranks}", "--"]
    supervisor = [*command("supervise", *words), str(folder / "script.py")]
    trace = ["strace", "-f", "-qq", "-y", "-ttt", "-s", "4096", "-e", f"trace={CALLS}", "-o"]
    with (folder / f"output-{number}").open("wb") as output:
        return subprocess.Popen(
            [*trace, str(folder / f"trace-{number}"), *supervisor],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait_for(folder: Path, pattern: str, nodes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Wait until a file exists; return the time."""
    end = time.monotonic() + TIMEOUT
    while not any(folder.glob(pattern)):
        if time.monotonic() > end or any(node.poll() is not None for node in nodes):
            said = "".join(path.read_text() for path in folder.glob("output-*"))
            raise turns.BenchError(f"{pattern} does not appear in the run directory:\n{said}")
        time.sleep(0.1)
    return time.time()


def _read(folder: Path, number: int) -> list[Operation]:
    """Read the operations of a node on the run directory; ranks are part of it."""
    run = re.escape(f"{folder / 'run'}/")
    # PID TIME call(AT_FDCWD</current/directory>, "/path" or 3</path>
    line_of = re.compile(rf'\d+ +([\d.]+) (\w+)\((?:AT_FDCWD<[^>]*>, )?(?:\d+<|")({run}[^">]*)')
    found = []
    with (folder / f"trace-{number}").open(errors="replace") as lines:
        for line in lines:
            if match := line_of.match(line):
                at, call, path = match.groups()
                found.append(Operation(float(at), call, path.removeprefix(f"{folder / 'run'}/")))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
