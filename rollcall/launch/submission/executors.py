"""Start jobs through submitit: with sbatch on a cluster, with a controller process on one machine.

submitit usually pickles a function and runs it. Here it submits a command line instead, so no
pickle is ever written or read.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError

from rollcall.messages.refusal import RefusedError
from rollcall.records.job import local_output
from rollcall.system.process import stat

YEAR_MINUTES = 366 * 24 * 60
LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "PMI", "OMPI_", "SUBMITIT_", "TORCHELASTIC_", "ROLE_")
NEEDED = ("SLURM_CONF", "SLURM_JWT")
"""Where Slurm's commands find the cluster, and who the user is."""
RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLLCALL_WORLD_SIZE", "ROLLCALL_RUN_DIR"),
}


class Slurm(submitit.SlurmExecutor):
    """submitit's Slurm executor, which submits rollcall's job script."""

    def __init__(self, folder: Path, script: str) -> None:
        if self.affinity() < 0:  # submitit asks for srun in the same way, and fails without it
            raise RefusedError(
                "sbatch is on PATH, but srun is not; add the directory that has srun to PATH, "
                "or use --local to run on this machine"
            )
        super().__init__(folder)
        self._script = script

    def start(self) -> str:
        """Submit the script; return the job id, or raise RefusedError if sbatch refuses it."""
        try:
            return str(self._submit_command("").job_id)
        except FailedJobError as error:
            raise RefusedError(f"sbatch refuses the job: {error}") from None
        finally:
            for leftover in self.folder.glob(".submission_file_*.sh"):
                leftover.unlink()  # a hard link to <job id>_submission.sh, or a refused script

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        return self._script


class Local(submitit.LocalExecutor):
    """submitit's local executor; its tasks are the simulated nodes of a run."""

    def start(self, words: Sequence[str], nodes: int, minutes: float | None) -> submitit.Job[None]:
        """Start a command per node under a controller, which sends SIGUSR2 before the limit."""
        limit = min(minutes or YEAR_MINUTES, YEAR_MINUTES)  # infinity is a limit of sbatch's
        delay = int(min(120, limit * 30))
        limits = {"timeout_min": limit, "signal_delay_s": delay}
        self.update_parameters(tasks_per_node=nodes, stderr_to_stdout=True, **limits)
        # submitit would hide all GPUs, because it was asked for none.
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        env = ["-u", "CUDA_VISIBLE_DEVICES"] if gpus is None else [f"CUDA_VISIBLE_DEVICES={gpus}"]
        # The controller must outlive a closed terminal and a Ctrl-C meant for this process. A new
        # program inherits ignored signals. Python lets only the main thread ignore them.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGHUP) if is_main else ()
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        try:
            with _without_output():
                job: submitit.Job[None] = self._submit_command(shlex.join(["env", *env, *words]))
            local_output(self.folder, job.job_id, 0).touch()  # by it others know a local job
            shown = Path(f"/proc/{job.job_id}/cmdline")
            while stat(job.job_id)[:1] not in ([], ["Z"]) and not shown.read_bytes():
                time.sleep(0.001)  # until its program begins, it looks as if it had ended
            return job
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Start processes without output: they would keep open a pipe that reads this process."""
    sys.stdout.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with Path(os.devnull).open("wb") as nowhere:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
        yield
    finally:
        for number, descriptor in kept.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


def clear_inherited_environment() -> None:
    """Remove variables of a surrounding job or rank, which a new job would take for its own.

    This includes SBATCH_*, which overrides the job script: layers.py has put these options there.
    """
    if "SLURM_JOB_ID" in os.environ:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for name in list(os.environ):
        if name not in NEEDED and (name.startswith(LEAKING) or name in RANK_VARIABLES):
            del os.environ[name]
