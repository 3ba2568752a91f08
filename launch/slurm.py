"""What does Slurm know of jobs? Here and in cluster.py alone are its commands run and read."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass

UNLIMITED = float("inf")
TIMESTAMP = "%Y-%m-%dT%H:%M:%S"
TIME_FORMATS = "M (minutes), M:S, H:M:S, D-H (days and hours), D-H:M or D-H:M:S"
FINAL = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""States in which a job stays. A preempted one that is queued again is COMPLETING, then PENDING."""
os.environ["SLURM_TIME_FORMAT"] = "standard"  # else times are written as the user likes them
AT_ONCE = 5000
"""Jobs in one question: Linux allows a word of a command line 128 kB."""


class SlurmError(Exception):
    """Slurm refused, or a command of it failed; the message says what would be valid."""


def is_available() -> bool:
    """Whether jobs can be submitted from here."""
    return any(
        os.access(os.path.join(folder, "sbatch"), os.X_OK)  # noqa: PTH118 - no shutil, no pathlib
        for folder in os.environ.get("PATH", "").split(os.pathsep)
    )


def seconds(text: str) -> float:
    """A time limit as Slurm reads it: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, `infinite`.

    Raises:
        ValueError: it is none of these.
    """
    if text.lower() in ("infinite", "unlimited"):
        return UNLIMITED
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"'{text}' is no time that Slurm reads: {TIME_FORMATS}")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, rest = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(numbers) == 3:
        return numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def times(job_id: str) -> tuple[str, float]:
    """The time limit of a running job, as Slurm writes it, and the seconds it has used.

    Raises:
        SlurmError: Slurm does not answer, or the job has ended.
    """
    answer = ask("squeue", "-h", "-j", job_id, "-o", "%l %M").split()
    if len(answer) != 2:
        raise SlurmError(f"job {job_id} does not run any more")
    return answer[0], seconds(answer[1])


def state(job_id: str) -> str | None:
    """The state of a job that waits or runs, None once Slurm no longer lists it.

    Of an array it is that of a task that has not ended, if there is one.
    """
    answer = subprocess.run(
        ["squeue", "-h", "-j", job_id, "-t", "all", "-o", "%T"],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 0:
        states = answer.stdout.split()
        return next((state for state in states if state not in FINAL), (*states, None)[0])
    if "Invalid job id" in answer.stderr:
        return None
    raise SlurmError(f"squeue does not answer: {plain(answer.stderr)}")


class JobInfo(NamedTuple):
    """What Slurm knows of a job.

    Attributes:
        state: PENDING, RUNNING, a final state, ...
        reason: why it waits, in Slurm's word; "None" for none.
        start: when it started or is expected to, as Slurm writes it; "N/A" for not known.
        nodes: how many hosts it has or asks for.
    """

    state: str
    reason: str
    start: str
    nodes: int


def queue(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """Those of these jobs that Slurm's controller still remembers.

    Raises:
        SlurmError: there is no squeue, or it does not answer.
    """
    if len(job_ids) > AT_ONCE:
        return queue(job_ids[:AT_ONCE]) | queue(job_ids[AT_ONCE:])
    # -r: a line for each task of an array, also for those that wait together.
    command = ["squeue", "-h", "-r", "-t", "all", "-j", ",".join(job_ids)]
    command += ["-o", "%i|%A|%T|%r|%S|%D"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError("there is no squeue on PATH") from None
    # Only where one job is asked for is it an error that it is gone (22.05).
    if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
        raise SlurmError(f"squeue does not answer: {plain(answer.stderr)}")
    found: dict[str, JobInfo] = {}
    for line in answer.stdout.splitlines():
        name, raw, state, reason, start, nodes = line.split("|")
        info = JobInfo(state, reason, start, int(nodes))
        # An array's number, which one of its tasks has, too, stands for one that has not ended.
        for key in (name, raw, name.partition("_")[0]):
            if key not in found or found[key].state in FINAL:
                found[key] = info
    return found


def accounting(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """What the accounting database tells of these jobs; nothing where there is none."""
    if len(job_ids) > AT_ONCE:
        return accounting(job_ids[:AT_ONCE]) | accounting(job_ids[AT_ONCE:])
    command = ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids)]
    command += ["-o", "JobID,JobIDRaw,State,Start,NNodes"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in answer.stdout.splitlines():
        name, raw, state, start, nodes = line.split("|")
        # "CANCELLED by 1000"
        found[name] = found[raw] = JobInfo(state.split()[0], "None", start, int(nodes))
    return found


class Standing(NamedTuple):
    """How a job of ours that runs stands, or why it ends.

    Attributes:
        state: RUNNING, COMPLETING, ...
        reason: why it ends, such as TimeLimit; "None" where Slurm gives none.
        end: when its time is up, in seconds since 1970 by the controller's clock; the end of its
            grace time once it is preempted.
        is_preempted: whether another job takes its nodes.
    """

    state: str
    reason: str
    end: float
    is_preempted: bool


STANDING = ("squeue", "-h", "-t", "all", "-O", "State:|,Reason:|,EndTime:|,PreemptTime:", "-j")


def standing(job_id: str) -> Standing:
    """How a job stands that has not left the queue.

    Raises:
        SlurmError: Slurm does not answer, or does not know it.
    """
    try:
        return read_standing(ask(*STANDING, job_id))
    except ValueError:  # of a task of an array that is gone there is nothing, not even an error
        raise SlurmError(f"squeue does not know job {job_id}") from None


def ask_standing(job_id: str) -> subprocess.Popen[bytes]:
    """Ask how a job stands without waiting for the answer, which is for `read_standing`.

    Raises:
        SlurmError: there is no squeue.
    """
    return in_background([*STANDING, job_id], stdout=subprocess.PIPE)


def read_standing(answer: str) -> Standing:
    """What squeue says of one job.

    Raises:
        ValueError: it says nothing.
    """
    state, reason, end, preempted = answer.strip().split("|")
    try:
        when = time.mktime(time.strptime(end, TIMESTAMP))
    except ValueError:
        when = UNLIMITED  # N/A
    return Standing(state, reason, when, preempted not in ("N/A", "Unknown", "None", ""))


def tell(*command: str) -> str:
    """Run a command of Slurm's that changes something; what it answers.

    Raises:
        SlurmError: it is not there or refuses.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} on PATH") from None
    except subprocess.CalledProcessError as error:
        raise SlurmError(f"{command[0]} refuses: {plain(error.stderr)}") from None


def tell_in_background(*command: str) -> subprocess.Popen[bytes]:
    """Run a command of Slurm's without waiting for it or for its words: the controller may hang.

    Raises:
        SlurmError: it is not there.
    """
    return in_background(command)


def end_steps(job_id: str, but: str | None = None) -> None:
    """End what srun has started in a job, but not its script.

    Args:
        job_id: the job.
        but: the id of a step that stays.

    Raises:
        SlurmError: Slurm does not answer or refuses.
    """
    names = ask("squeue", "-h", "-s", "-j", job_id, "-o", "%i").split()
    ids = {name: name.rpartition(".")[2] for name in names}
    if steps := [name for name in names if ids[name].isdecimal() and ids[name] != but]:
        tell("scancel", *steps)


def step(job_id: str, hosts: Sequence[str]) -> list[str]:
    """The srun that starts one process on each of these hosts of a running job, beside its own.

    Raises:
        SlurmError: it is the task 12_3 of an array, and Slurm does not tell its number.
    """
    if "_" in job_id:  # srun does not take 12_3 (22.05)
        job_id = ask("squeue", "-h", "-j", job_id, "-o", "%A").strip()
    # Without --overlap it would wait until the job ends.
    place = [f"--jobid={job_id}", "--overlap", f"--nodelist={','.join(hosts)}"]
    return ["srun", *place, f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--cpus-per-task=1"]


def in_background(
    command: Sequence[str], stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Run a command of Slurm's without waiting for it.

    Raises:
        SlurmError: it is not there.
    """
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    except OSError:
        raise SlurmError(f"there is no {command[0]} on PATH") from None


def ask(*command: str) -> str:
    """What a command of Slurm's answers that changes nothing.

    Raises:
        SlurmError: it is not there or does not answer.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} on PATH, though sbatch is") from None
    except subprocess.CalledProcessError as error:
        raise SlurmError(
            f"{command[0]} does not answer: {plain(error.stderr)} (--local needs no Slurm)"
        ) from None


def plain(stderr: str) -> str:
    """Slurm's message in one line, without `sbatch: error:` before every sentence."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in stderr.strip().splitlines()]
    return "; ".join(lines)
