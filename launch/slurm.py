"""What does Slurm know and allow? The only place where its commands are run and their text read."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from launch.job import Job

UNLIMITED = float("inf")
TIME_FORMATS = "M (minutes), M:S, H:M:S, D-H (days and hours), D-H:M or D-H:M:S"
FINAL = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    "TIMEOUT",
}
"""States in which a job stays; PREEMPTED is none: it is requeued."""


class SlurmError(Exception):
    """Slurm refused, or a command of it failed; the message says what would be valid."""


class Partition(NamedTuple):
    """A partition and what it allows.

    Attributes:
        nodes: hosts in it.
        largest_job: hosts that one job may have.
        limit: longest time of a job, in seconds.
        limit_text: the same, as Slurm writes it.
    """

    name: str
    is_default: bool
    nodes: int
    largest_job: float
    limit: float
    limit_text: str


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


def partitions() -> dict[str, Partition]:
    """All partitions that take jobs, by name."""
    found: dict[str, Partition] = {}
    for line in _run("sinfo", "-h", "-o", "%P|%D|%s|%l|%a").splitlines():
        name, nodes, size, limit, state = line.split("|")
        if state != "up":
            continue
        plain = name.rstrip("*")
        # A partition has one line per time limit and state it is in; the hosts add up.
        before = found[plain].nodes if plain in found else 0
        largest = size.rpartition("-")[2]
        found[plain] = Partition(
            plain,
            name.endswith("*"),
            before + int(nodes),
            UNLIMITED if largest == "infinite" else int(largest),
            seconds(limit),
            limit,
        )
    return found


def check(job: Job, script: str) -> str:
    """Ask whether Slurm would take a job; return when and where it expects to start it.

    Raises:
        SlurmError: it would not; the message names the option and what would be valid.
    """
    known = partitions()
    names = ", ".join(sorted(known))
    if job.partition is None:
        chosen = next((entry for entry in known.values() if entry.is_default), None)
        if chosen is None:
            raise SlurmError(f"there is no default partition here: add --partition, one of {names}")
    elif job.partition not in known:
        raise SlurmError(f"--partition {job.partition}: there is none; those here are {names}")
    else:
        chosen = known[job.partition]
    most = min(chosen.nodes, chosen.largest_job)
    if job.nodes > most:
        raise SlurmError(
            f"--nodes {job.nodes}: a job in partition {chosen.name} can have {most:.0f} at most"
        )
    # Slurm itself queues such a job for ever (EnforcePartLimits=NO, its default).
    if job.time is not None and seconds(job.time) > chosen.limit:
        raise SlurmError(
            f"--time {job.time}: the limit of partition {chosen.name} is {chosen.limit_text}"
        )
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
    )
    message = _plain(answer.stderr)
    if answer.returncode == 0:
        start = re.search(r"to start at (\S+) .*on nodes (\S+)", message)
        return f"expected to start at {start[1]} on {start[2]}" if start else message
    if "node configuration is not available" in message:
        message = (
            f"no {job.nodes} nodes of partition {chosen.name} have what you ask for, per node: "
        )
        message += f"{_per_node(job)}; its nodes have {_hardware(chosen.name)}"
    raise SlurmError(f"sbatch refuses the job: {message}")


def _per_node(job: Job) -> str:
    asked = {"gpus-per-node": job.gpus_per_node, "cpus-per-task": job.cpus_per_task, "mem": job.mem}
    return ", ".join(f"--{option} {value}" for option, value in asked.items() if value)


def _hardware(partition: str) -> str:
    kinds = []
    for line in _run("sinfo", "-h", "-p", partition, "-o", "%D|%c|%m|%G").splitlines():
        nodes, cpus, megabytes, gres = line.split("|")
        gpus = "no GPU" if gres == "(null)" else gres.partition("(")[0]
        kinds.append(f"{cpus} CPUs, {megabytes} MB and {gpus} ({nodes} nodes)")
    return "; or ".join(kinds)


def state(job_id: str) -> str | None:
    """The state of a job that waits or runs, None once Slurm no longer lists it."""
    answer = subprocess.run(
        ["squeue", "-h", "-j", job_id, "-t", "all", "-o", "%T"],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 0:
        return answer.stdout.strip() or None
    if "Invalid job id" in answer.stderr:
        return None
    raise SlurmError(f"squeue does not answer: {_plain(answer.stderr)}")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} on PATH, though sbatch is") from None
    except subprocess.CalledProcessError as error:
        raise SlurmError(
            f"{command[0]} does not answer: {_plain(error.stderr)} (--local needs no Slurm)"
        ) from None


def _plain(stderr: str) -> str:
    """Slurm's message in one line, without `sbatch: error:` before every sentence."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in stderr.strip().splitlines()]
    return "; ".join(lines)
