"""What do Slurm's and the kernel's words mean? Reasons, final states, signals in plain English."""

from __future__ import annotations

import signal

PENDING = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs with a higher priority come first",
    "Resources": "the nodes it needs are busy",
    "BeginTime": "its start time has not come (python -m launch requeue skips that)",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job it waits for has failed: it never starts, cancel it",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "Licenses": "all licences are in use",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "a node that it asks for is down, drained or reserved",
    "NodeDown": "a node that it asks for is down",
    "BadConstraints": "no node has the features it asks for: it never starts",
    "PartitionDown": "its partition is closed",
    "PartitionInactive": "its partition is closed",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows: it never starts",
    "PartitionTimeLimit": "it asks for more time than its partition allows: it never starts",
    "InvalidAccount": "its account is not valid here",
    "InvalidQOS": "its QOS is not valid here",
    "JobArrayTaskLimit": "as many tasks of its array run as may run at once",
    "Cleaning": "its last attempt is being cleaned up",
    "launch failed requeued held": "a node failed to start it and it is held: scontrol release",
}
"""Reasons for which a job waits, by squeue's word."""
LIMITS = {
    "PerUser": "what each user may have at once",
    "PerAccount": "what each account may have at once",
    "PerJob": "what one job may have",
    "PerNode": "what one job may have on a node",
    "Grp": "what the group may have at once",
    "Max": "the most that is allowed",
}
"""What a limit counts, by a part of its name."""
ENDED = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline passed",
    "FAILED": "the job failed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it ran out of memory: ask for more with --mem",
    "PREEMPTED": "another job took its nodes",
    "TIMEOUT": "its time limit was reached: submit it again to continue (--time)",
}
"""How Slurm ends a job, by its state."""
SIGNALS = {
    signal.SIGKILL: "usually the kernel or Slurm, because memory ran out: see --mem and dmesg",
    signal.SIGSEGV: "a bug in native code, often libraries that were built for different versions",
    signal.SIGBUS: "usually a full /dev/shm, or a mapped file that was cut meanwhile",
    signal.SIGILL: "code that was built for another CPU",
    signal.SIGFPE: "a division by zero in native code",
    signal.SIGABRT: "native code gave up and says why in the log; so does NCCL without a peer",
    signal.SIGTERM: "somebody asked it to end before it could handle that: scancel or a time limit",
}
"""What usually sends a signal that ends a rank."""


def pending(reason: str) -> str:
    """Why a job waits.

    Args:
        reason: as squeue gives it, possibly with details after a comma.
    """
    word = reason.strip("()").partition(",")[0]
    if word in PENDING:
        return PENDING[word]
    if word.startswith(("QOS", "Assoc", "Max")):
        whose = {"QOS": "its QOS", "Assoc": "its account"}
        limit = next((text for part, text in LIMITS.items() if part in word), "a limit")
        owner = next((text for part, text in whose.items() if word.startswith(part)), "the site")
        return f"{word}: {owner} limits {limit}"
    return word


def ended(state: str) -> str:
    """How Slurm has ended a job, by its state."""
    return ENDED.get(state, f"Slurm says {state}")


def signal_of(exit_code: int) -> int | None:
    """The signal that an exit code tells of; None for one that a program chose, such as 255."""
    return exit_code - 128 if exit_code - 128 in signal.valid_signals() else None


def of_signal(number: int) -> str:
    """A signal's name and what usually sends it."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time one, of which only the first and the last have names
        return f"signal {number}"
    return f"{name}, {SIGNALS[number]}" if number in SIGNALS else name  # type: ignore[index]
