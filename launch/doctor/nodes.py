"""Run the doctor on every node of a job, and bring the results together."""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rollcall.installation import IS_CHECKOUT, ROOT, command
from rollcall.launch.doctor import report
from rollcall.launch.doctor.check import QUICK, THOROUGH, Found
from rollcall.launch.doctor.checkup import Results
from rollcall.launch.doctor.command import MARK
from rollcall.launch.scheduler.job import Job, options
from rollcall.process import die_with_parent
from rollcall.records.files import read_object

NOT_OF_SRUN = {
    *("array", "output", "open-mode", "requeue", "no-requeue", "no-kill", "signal", "mail-type")
}
"""Options of a job script that a waiting srun does not take or need."""
WAITING = 24 * 3600.0
"""Seconds for which the nodes may be in use by others."""
CLOCKS_DIFFER = 1.0
"""Seconds; starting a process on a node and hearing of it takes less."""
PREFLIGHT = QUICK + 7
"""Seconds after which a node that has not answered to the quick checks counts as bad."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCHLD)


def doctor(root: Path, *words: str) -> list[str]:
    """Return the command line of the doctor, which works in every directory."""
    program = [sys.executable, f"{ROOT}/env/bin/rollcall"] if IS_CHECKOUT else list(command())
    return [*program, "doctor", f"--root={root}", *words]


@contextlib.contextmanager
def meeting_place(root: Path) -> Iterator[Path]:
    """Yield a directory that all nodes see, for their results; it is removed."""
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory("", ".doctor-", root, ignore_cleanup_errors=True) as name:
            yield Path(name)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                root.rmdir()


def ask(
    commands: Sequence[Sequence[str]], into: Path, nodes: Sequence[str] | int, limit: float
) -> dict[str, Results]:
    """Run command lines that start the doctor on nodes; return what each node found.

    Args:
        commands: each starts the doctor on one or more nodes.
        into: the directory into which it writes its results.
        nodes: the names of the nodes, or how many there are.
        limit: seconds after which nodes that have not answered are given up.
    """
    clocks: dict[str, float] = {}
    started = [*map(_start, commands)]
    listeners = [threading.Thread(target=_listen, args=[it, clocks], daemon=True) for it in started]
    end = time.monotonic() + limit
    try:
        for listener in listeners:
            listener.start()
        for listener in listeners:
            listener.join(max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            _end(process)
    found = {path.stem: _results(path) for path in sorted(into.glob("*.json"))}
    for node in found.keys() & clocks.keys() if len(clocks) > 1 else ():
        offset = clocks[node] - median(clocks.values())
        found[node]["clock"] = Found("ok", f"{offset:+.1f} s", offset, CLOCKS_DIFFER)
    if isinstance(nodes, int):
        nodes = [f"unknown-{number}" for number in range(nodes - len(found))]
    silent = {"python": Found("bad", "the doctor does not answer")}
    return found | {node: silent for node in nodes if node not in found}


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        die_with_parent(signal.SIGTERM)  # which an srun that waits for nodes passes on

    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(
        words, stdin=null, stdout=pipe, text=True, start_new_session=True, preexec_fn=begin
    )


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listen(process: subprocess.Popen[str], clocks: dict[str, float]) -> None:
    """Take down by how much each node's clock is ahead; the least delayed line counts."""
    for line in process.stdout or ():
        words = line.split()
        if words[:1] == [MARK] and len(words) == 3:
            ahead = float(words[2]) - time.time()
            clocks[words[1]] = max(ahead, clocks.get(words[1], -math.inf))
        else:
            print(line, end="", file=sys.stderr)


def _results(path: Path) -> Results:
    fields: Mapping[str, Any] = read_object(path) or {}
    return {name: Found(*values) for name, values in fields.items()}


def report_on(job: Job, root: Path, local: bool, as_json: bool) -> int:
    """Check the nodes that a job would get, and print a table; return 1 if something is wrong."""
    count = job.nodes + job.spares
    with meeting_place(root) as into:
        words = [f"--into={into}", *([f"--python={job.python[0]}"] if job.python else [])]
        if local:
            commands = [doctor(root, *words, f"--as-node=node-{n}") for n in range(count)]
            found = ask(commands, into, count, THOROUGH + 15)
        else:
            if not job.allocation:
                print(f"waiting until {count} nodes are free for the doctor", file=sys.stderr)
            found = ask([_srun(job, count, doctor(root, *words))], into, count, WAITING)
    print(report.as_json(found) if as_json else "\n".join(report.lines(found, shows_all=False)))
    return int(report.is_bad(found))


def _srun(job: Job, count: int, words: list[str]) -> list[str]:
    """Return the command that starts the doctor once on each node, as the job would start."""
    place = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--wait=0"]
    if job.allocation:
        asked = [f"--jobid={job.allocation}", "--overlap", "--cpus-per-task=1"]
    else:
        given = [it for it in options(job) if it.partition("=")[0] not in NOT_OF_SRUN]
        asked = [word for option in given for word in shlex.split(f"--{option}")]
    if job.setup:  # of a profile
        words = ["bash", "-c", "\n".join([*job.setup, f"exec {shlex.join(words)}"])]
    return ["srun", *asked, *place, *job.srun, *words]
