"""Jobs as Slurm knows them. Only this file and cluster.py run Slurm's commands.

Every function that runs such a command raises SlurmError if the command is missing or fails, unless
the function says otherwise.
"""

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from rollcall.messages.refusal import RefusedError
from rollcall.system.hosts import expand

UNLIMITED = float("inf")
TIMESTAMP = "%Y-%m-%dT%H:%M:%S"
TIME_FORMATS = "M (minutes), M:S, H:M:S, D-H (days and hours), D-H:M or D-H:M:S"
FINAL = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""States that a job never leaves. A preempted and requeued job is COMPLETING, then PENDING."""
os.environ["SLURM_TIME_FORMAT"] = "standard"  # otherwise the user's own format applies
AT_ONCE = 5000
"""Most jobs per query: Linux limits a word of a command line to 128 kB."""
UNANSWERED = re.compile("Unable to contact|[Tt]imed out|[Cc]onnection refused")
"""Matches what Slurm's commands say while the controller is away."""
UNCONFIGURED = "this machine has Slurm's commands, but no cluster is configured"
SOON = 8
"""Seconds until a requeued job may start: by then it should be gone from its nodes."""


class SlurmError(RefusedError):
    """Slurm refused, or one of its commands failed; the message says what would be valid."""


class NoAnswerError(SlurmError):
    """Slurm's controller does not answer, or its nodes do not yet, as after a restart."""


def is_available() -> bool:
    """Whether jobs can be submitted from here."""
    sbatch = shutil.which("sbatch")
    return sbatch is not None and _has_cluster(os.path.dirname(sbatch))  # noqa: PTH120


@functools.cache
def _has_cluster(folder: str) -> bool:
    """Return False if Slurm's commands know of no cluster: a package or the lab brought them."""
    try:
        ask(f"{folder}/sinfo", "--version")  # it reads the configuration, and asks no controller
    except SlurmError as error:
        return UNCONFIGURED not in str(error)
    return True


def seconds(text: str) -> float:
    """Parse a Slurm time limit, which has a form of TIME_FORMATS, or raise ValueError."""
    if text.lower() in ("infinite", "unlimited"):
        return UNLIMITED
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"'{text}' is not a valid Slurm time limit; use {TIME_FORMATS}")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without hours
    hours, minutes, rest = (*numbers, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def times(job_id: str) -> tuple[str, float]:
    """Return the time limit of a running job, as Slurm writes it, and the seconds it has used."""
    answer = ask("squeue", "-h", "-j", job_id, "-o", "%l %M").split()
    if len(answer) < 2:
        raise SlurmError(f"job {job_id} is no longer running")
    return answer[0], seconds(answer[1])


def state(job_id: str) -> str | None:
    """Return the state of a live job, or of a live task of an array; None if Slurm forgot it."""
    info = queue([job_id]).get(job_id)
    return info.state if info else None


def has_ended(job_id: str) -> bool:
    """Whether a job is over, or forgotten."""
    return state(job_id) in (None, *FINAL)


class JobInfo(NamedTuple):
    """A job as Slurm reports it."""

    state: str  # PENDING, RUNNING, a final state, ...
    reason: str  # why it is pending; "None" without a reason
    start: str  # or when it is expected to, as Slurm writes it; "N/A" if unknown
    nodes: int  # how many hosts it has or requests


def queue(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """Return the jobs among these that Slurm's controller still remembers, by id."""
    if len(job_ids) > AT_ONCE:
        return queue(job_ids[:AT_ONCE]) | queue(job_ids[AT_ONCE:])
    # -r: print one line per array task, even for pending tasks.
    command = ("squeue", "-h", "-r", "-t", "all", "-j", ",".join(job_ids))
    try:
        answer = _run([*command, "-o", "%i|%A|%T|%r|%S|%D"], "does not answer")
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        return {}  # an unknown job is an error only if it is the only one in the query (22.05)
    found: dict[str, JobInfo] = {}
    for line in answer.splitlines():
        name, raw, state, reason, start, nodes = line.split("|")
        info = JobInfo(state, reason, start, int(nodes))
        # The array's number, which one task also has, maps to a task that has not ended.
        for key in (name, raw, name.partition("_")[0]):
            if key not in found or found[key].state in FINAL:
                found[key] = info
    return found


def accounting(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """Return what the accounting database knows about these jobs; empty without a database."""
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
        start = "N/A" if start in ("Unknown", "None") else start
        # "CANCELLED by 1000"
        found[name] = found[raw] = JobInfo(state.split()[0], "None", start, int(nodes))
    return found


class JobStatus(NamedTuple):
    """How a running job of ours is doing, or why it ends."""

    state: str  # RUNNING, COMPLETING, ...
    reason: str  # why it ends, such as TimeLimit; "None" where Slurm gives none
    end: float  # seconds since 1970; after a preemption, the end of the grace time
    is_preempted: bool  # whether another job takes its nodes


STATUS = ("squeue", "-h", "-t", "all", "-O", "State:|,Reason:|,EndTime:|,PreemptTime:", "-j")


def status(job_id: str) -> JobStatus:
    """Return the status of a job that has not left the queue."""
    try:
        return read_status(ask(*STATUS, job_id))
    except ValueError:  # of a task of an array that is gone there is nothing, not even an error
        raise SlurmError(f"squeue does not know job {job_id}") from None


def ask_status(job_id: str) -> subprocess.Popen[bytes]:
    """Ask for a job's status without waiting for the answer, which is for `read_status`."""
    return in_background([*STATUS, job_id], stdout=subprocess.PIPE)


def read_status(answer: str) -> JobStatus:
    """Parse what squeue says about one job; raise ValueError if it says nothing."""
    found = []
    for line in answer.strip().splitlines():  # one for each group: they share their fate
        state, reason, end, preempted = line.strip().split("|")
        try:
            when = time.mktime(time.strptime(end, TIMESTAMP))
        except ValueError:
            when = UNLIMITED  # N/A
        is_preempted = preempted not in ("N/A", "Unknown", "None", "")
        found.append(JobStatus(state, reason, when, is_preempted))
    return max(found, key=lambda it: (it.state != "RUNNING", it.is_preempted))


def script_signal(job_id: str) -> int:
    """Return the signal that ended a job's script, 0 if none did or Slurm has forgotten it."""
    try:
        answer = ask("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmError:
        return 0
    found = re.search(r"\bExitCode=\d+:(\d+)", answer)
    return int(found[1]) if found else 0


def tell(*command: str) -> str:
    """Run a Slurm command that changes something; return its output."""
    return _run(command, "refuses").strip()


def requeue_own_job(job_id: str, leave_out: Sequence[str] = ()) -> None:
    """Requeue this process's job, without some hosts; Slurm ends it, or refuses (--no-requeue)."""
    try:
        tell("scontrol", "requeue", job_id)
    except SlurmError as error:
        if "pending" not in str(error):  # Slurm has requeued it itself, or has heard us before
            raise
    start_soon(job_id, *([f"ExcNodeList={','.join(leave_out)}"] if leave_out else []))


def start_soon(job_id: str, *changes: str) -> None:
    """Let a job that ends and is requeued wait for a few seconds only.

    By default, Slurm lets it wait until its credentials expire, which takes two minutes. It does
    not if a start time in the future is set while the job ends (22.05).
    """
    tell("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{SOON}", *changes)


def steps(job_id: str, but: str | None = None) -> list[str]:
    """Return the names of a job's steps that srun has started, except for one."""
    names = ask("squeue", "-h", "-s", "-j", job_id, "-o", "%i").split()
    numbers = [(name, name.rpartition(".")[2]) for name in names]
    return [name for name, number in numbers if number.isdecimal() and number != but]


def end_steps(job_id: str, but: str | None = None, kills: bool = True) -> None:
    """Kill the steps of a job except for one, or ask them to stop, but not its batch script."""
    if names := steps(job_id, but):
        tell("scancel", *([] if kills else ["--signal=TERM"]), *names)


def step(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Return an srun command that starts one extra process on each of these hosts of a job."""
    if "_" in job_id:  # srun does not accept 12_3 (22.05)
        job_id = ask("squeue", "-h", "-j", job_id, "-o", "%A").strip()
    # Without --overlap, it would wait until the job ends.
    place = [f"--jobid={job_id}", "--overlap", f"--nodelist={','.join(hosts)}"]
    return ["srun", *place, f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--cpus-per-task=1"]


def on_groups(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Return the same on one or all hosts of a running job, which may have groups of hosts."""
    listed = re.findall(r"\+(\d+) (.+)", ask("squeue", "-h", "-j", job_id, "-o", "%i %N"))
    groups = [group for group, nodes in listed if {*expand(nodes)} & {*hosts}]
    if not groups:
        return step(job_id, hosts)
    place = [f"--jobid={job_id}", "--overlap", f"--het-group={','.join(groups)}"]
    place += [f"--nodelist={hosts[0]}", "--nodes=1"] if len(hosts) == 1 else []
    return ["srun", *place, "--ntasks-per-node=1", "--cpus-per-task=1"]


def in_background(
    command: Sequence[str], stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a Slurm command without waiting for it, because the controller may hang."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    except OSError:
        raise SlurmError(f"{command[0]} is not on PATH") from None


def ask(*command: str) -> str:
    """Run a Slurm command that changes nothing; return its output."""
    return _run(command, "does not answer", " (--local needs no Slurm)")


def _run(command: Sequence[str], what: str, advice: str = "") -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on PATH") from None
    except subprocess.CalledProcessError as error:
        kind = NoAnswerError if UNANSWERED.search(error.stderr) else SlurmError
        raise kind(f"{command[0]} {what}: {plain(error.stderr)}{advice}") from None


def plain(stderr: str) -> str:
    """Return Slurm's message in one line, without `sbatch: error:` before every sentence."""
    if "Could not establish a configuration source" in stderr:
        return UNCONFIGURED
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in stderr.strip().splitlines()]
    return "; ".join(lines)
