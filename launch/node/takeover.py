"""Take over a job whose first host died, and its batch process with it.

A batch process whose step can do without a host writes a heartbeat, which a supervisor watches that
lost another node. The first one to create the file of the next batch process starts that process.
"""

import contextlib
import os
import subprocess
import time

from rollcall.installation import command
from rollcall.launch.node import heartbeat
from rollcall.launch.node.identity import start_of
from rollcall.launch.scheduler import slurm
from rollcall.records.attempt import Heartbeat
from rollcall.records.job import BatchRecord
from rollcall.run_dir import RunDir
from rollcall.timer import RunningClock

LOOK = 0.25
"""Seconds between two looks at the heartbeat."""
OF_THE_JOB = ("SLURM_JOB", "SLURM_ARRAY_", "SLURM_CLUSTER_", "SLURM_CONF", "SLURM_RESTART_COUNT")
"""Prefixes of Slurm's variables that a step's process has in common with the job's script."""


def take_over(run: RunDir, job: str, host: str) -> None:
    """Start another batch process here if the job's own is silent and no other host does.

    Returns when there is nothing to do, or when the other batch process has ended.
    """
    known = BatchRecord.read(run.path)
    start = start_of(job, os.environ)
    if (
        known is None or known.start != start or not known.can_move
    ):  # the job ends with its first host
        return
    own = Heartbeat.of_batch(run.path, start, known.number)
    count, clock = own.read(), RunningClock()  # if the job is suspended, so is its batch process
    while clock.read() < heartbeat.SILENCE:
        time.sleep(LOOK)
        if own.read(is_doubted=True) not in (b"", count):
            return
    if not Heartbeat.of_batch(run.path, start, known.number + 1).create():
        return
    # In a separate step: the dead host's step ends when Slurm notices, or when it comes back.
    place = [*slurm.step(os.environ["SLURM_JOB_ID"], [host]), "--mem=0", "--output=none"]
    words = [*command("batch"), f"--number={known.number + 1}", f"--output={known.output}"]
    environment = {name: value for name, value in os.environ.items() if _is_of_the_job(name)}
    # Wait for it: this process is the last of its step, and Slurm would end both together.
    subprocess.run(
        [*place, *words, *known.words], env=environment, start_new_session=True, check=False
    )


def leave_step(output: str) -> str:
    """Act as the job's script, which writes to `output`; return the id of the step that is left."""
    with contextlib.suppress(OSError):  # it was not a file; the srun of the step ends early
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    # Otherwise the next srun would take what describes this step for its own options.
    step = os.environ["SLURM_STEP_ID"]
    for name in [name for name in os.environ if not _is_of_the_job(name)]:
        del os.environ[name]
    return step


def _is_of_the_job(name: str) -> bool:
    """Whether a variable is not Slurm's, or one that the job's script has too."""
    return not name.startswith(("SLURM_", "SRUN_")) or name.startswith(OF_THE_JOB)
