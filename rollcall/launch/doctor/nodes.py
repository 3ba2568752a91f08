"""Run the doctor on every node of a job, and collect the results."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcall.cli.installation import IS_CHECKOUT, ROOT, command
from rollcall.launch.doctor.check import QUICK, THOROUGH, Result
from rollcall.launch.doctor.checkup import Results
from rollcall.launch.doctor.command import as_json, is_bad, lines
from rollcall.launch.scheduler.job import Job, options
from rollcall.system.files import read_object
from rollcall.system.process import die_with_parent

NOT_OF_SRUN = {
    *("array", "output", "open-mode", "requeue", "no-requeue", "no-kill", "signal", "mail-type")
}
"""Options of a job script that a waiting srun does not accept or need."""
WAITING = 24 * 3600.0
"""Seconds for which the nodes may be in use by others."""
PREFLIGHT = QUICK + 7
"""Seconds after which a node that has not answered the quick checks counts as bad."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCHLD)


def doctor(root: Path, *words: str) -> list[str]:
    """Return the command line of the doctor, valid in every directory."""
    program = [sys.executable, f"{ROOT}/env/bin/rollcall"] if IS_CHECKOUT else list(command())
    return [*program, "doctor", f"--root={root}", *words]


@contextlib.contextmanager
def result_directory(root: Path) -> Iterator[Path]:
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
    """Run command lines that start the doctor on nodes; return the results by node.

    The doctor writes `into` a directory. `nodes` are names, or how many there are; those that have
    not answered within `limit` seconds are given up.
    """
    processes = [*map(_start, commands)]
    end = time.monotonic() + limit
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            _end(process)
    results: dict[str, Results] = {}
    for path in sorted(into.glob("*.json")):
        fields = read_object(path) or {}
        results[path.stem] = {name: Result(*values) for name, values in fields.items()}
    if isinstance(nodes, int):
        nodes = [f"unknown-{number}" for number in range(nodes - len(results))]
    silent = {"python": Result("bad", "the doctor does not answer")}
    return results | {node: silent for node in nodes if node not in results}


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        die_with_parent(signal.SIGTERM)  # which an srun that waits for nodes passes on

    null = subprocess.DEVNULL
    # What the nodes print is a problem: 2 is standard error.
    return subprocess.Popen(words, stdin=null, stdout=2, start_new_session=True, preexec_fn=begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def report_on(job: Job, root: Path, local: bool, prints_json: bool) -> int:
    """Check the nodes that a job would get, and print a table; return 1 if something is wrong."""
    count = job.nodes + job.spares
    with result_directory(root) as into:
        words = [f"--into={into}", *([f"--python={job.python[0]}"] if job.python else [])]
        if local:
            commands = [doctor(root, *words, f"--as-node=node-{n}") for n in range(count)]
            results = ask(commands, into, count, THOROUGH + 15)
        else:
            if not job.allocation:
                print(f"waiting until {count} nodes are free for the doctor", file=sys.stderr)
            results = ask([_srun(job, count, doctor(root, *words))], into, count, WAITING)
    print(as_json(results) if prints_json else "\n".join(lines(results, shows_all=False)))
    return int(is_bad(results))


def _srun(job: Job, count: int, words: list[str]) -> list[str]:
    """Return the command that starts the doctor once on each node, as the job would start."""
    layout = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--wait=0"]
    if job.allocation:
        request = [f"--jobid={job.allocation}", "--overlap", "--cpus-per-task=1"]
    else:
        given = [text for text in options(job) if text.partition("=")[0] not in NOT_OF_SRUN]
        request = [word for option in given for word in shlex.split(f"--{option}")]
    if job.setup:  # of a profile
        words = ["bash", "-c", "\n".join([*job.setup, f"exec {shlex.join(words)}"])]
    return ["srun", *request, *layout, *job.srun, *words]
