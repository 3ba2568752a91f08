"""Who looks after a job whose first host has died, and its batch with it? Another supervisor.

A batch whose step can do without a host counts aloud, as the supervisors do. Those that have lost
another node look whether that count still goes on. If not, the first of them to make the file of
the next count starts another batch, on its own host.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch import heartbeat, slurm
from launch.node import start_of
from train.run import RunDir, write_atomic

LOOK = 0.25
"""Seconds between two looks at the count."""
OF_THE_JOB = ("SLURM_JOB", "SLURM_ARRAY_", "SLURM_CLUSTER_", "SLURM_CONF", "SLURM_RESTART_COUNT")
"""Variables of Slurm's that a step's process has in common with the job's script."""


class Pulse:
    """The count of a job's batch, and what another one must know in order to go on in its place.

    Args:
        start: of the job.
        number: how many batches of this start have died.
        words: the batch's command line.
    """

    def __init__(self, run: RunDir, start: str, number: int, words: Sequence[str]) -> None:
        self._count = 0
        self._path = _path(run, start, number)
        self._successor = _path(run, start, number + 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        output = str(Path("/proc/self/fd/1").readlink())
        known = {"start": start, "number": number, "words": list(words), "output": output}
        self.beat()
        write_atomic(run.job / "batch.json", json.dumps(known) + "\n")

    def beat(self) -> bool:
        """Count; whether this is still the job's batch."""
        self._count += 1
        heartbeat.write(self._path, b"%08d" % self._count)
        return not self._successor.exists()


def take_over(run: RunDir, job: str, host: str) -> None:
    """Start another batch on this host if the job's own is silent, and no other host does it.

    Returns when there is nothing to do, or with the end of the other batch.
    """
    try:
        known = json.loads((run.job / "batch.json").read_text())
    except FileNotFoundError:  # the job ends with its first host
        return
    start, number = start_of(job, os.environ), known["number"]
    if known["start"] != start:
        return
    pulse = _path(run, start, number)
    count, end = pulse.read_bytes(), time.monotonic() + heartbeat.SILENCE
    while time.monotonic() < end:
        time.sleep(LOOK)
        if pulse.read_bytes() != count:
            return
    try:
        os.close(
            os.open(_path(run, start, number + 1), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        )
    except FileExistsError:
        return
    # In a step of its own: the one of the dead host ends when Slurm notices, or when it comes back.
    place = [*slurm.step(os.environ["SLURM_JOB_ID"], [host]), "--mem=0", "--output=none"]
    own = [f"--number={number + 1}", f"--output={known['output']}"]
    words = [sys.executable, "-m", "launch", "batch", *own, *known["words"]]
    environment = {name: value for name, value in os.environ.items() if _is_of_the_job(name)}
    # Waited for: Slurm would end it with this process, which is its step's last one.
    subprocess.run([*place, *words], env=environment, start_new_session=True, check=False)


def leave_step(output: str) -> str:
    """Be the job's script instead of a step; return the id of that.

    Args:
        output: where the job writes. The srun of the step would write it, but ends early.
    """
    with contextlib.suppress(OSError):  # it was no file
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    # Else the next srun would take what describes this step for its options.
    step = os.environ["SLURM_STEP_ID"]
    for name in [name for name in os.environ if not _is_of_the_job(name)]:
        del os.environ[name]
    return step


def _path(run: RunDir, start: str, number: int) -> Path:
    return run.job / "heartbeats" / f"{start}.batch-{number}"


def _is_of_the_job(name: str) -> bool:
    """Whether a variable is none of Slurm's, or one that the job's script has, too."""
    return not name.startswith(("SLURM_", "SRUN_")) or name.startswith(OF_THE_JOB)
