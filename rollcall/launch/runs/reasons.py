"""Slurm's reasons and states, and signals, explained in plain English."""

import signal

PENDING = {
    "None": "Slurm has not considered it yet",
    "Priority": "jobs with a higher priority come first",
    "Resources": "the nodes it needs are busy",
    "BeginTime": "its start time has not come yet (rollcall requeue skips the wait)",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job it waits for has failed: it never starts, cancel it",
    "JobHeldUser": "it is held: release it with scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "Licenses": "all licences are in use",
    "Reservation": "its reservation has not started",
    "ReqNodeNotAvail": "a node that it asks for is down, drained or reserved",
    "NodeDown": "a node that it asks for is down",
    "BadConstraints": "no node has the features it asks for: it never starts",
    "PartitionDown": "its partition is closed",
    "PartitionInactive": "its partition is closed",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows: it never starts",
    "PartitionTimeLimit": "it asks for more time than its partition allows: it never starts",
    "InvalidAccount": "its account is not valid here",
    "InvalidQOS": "its QOS is not valid here",
    "JobArrayTaskLimit": "the limit of running tasks of its array is reached",
    "Cleaning": "its last attempt is being cleaned up",
    "launch failed requeued held": "a node failed to start it, so it is held: scontrol release",
}
"""Explanations of why a job waits, by the reason that squeue shows."""
LIMITS = {
    "PerUser": "what each user may have at once",
    "PerAccount": "what each account may have at once",
    "PerJob": "what one job may have",
    "PerNode": "what one job may have on a node",
    "Grp": "what the group may have at once",
    "Max": "the most that is allowed",
}
"""The scope of a limit, by a part of its name."""
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
"""Explanations of how Slurm ended a job, by its state."""
NO_THREADS = "the limit of processes and threads is reached: see ulimit -u, and the job's pids.max"
SIGNALS = {
    signal.SIGKILL: "usually the kernel or Slurm, because memory ran out: see --mem and dmesg",
    signal.SIGSEGV: "a bug in native code, often libraries built for different versions",
    signal.SIGBUS: "usually a full /dev/shm, or a mapped file that was truncated",
    signal.SIGILL: "code built for another CPU",
    signal.SIGFPE: "a division by zero in native code",
    signal.SIGABRT: "native code gave up, see the log; NCCL does this when it loses a peer, gloo "
    "when ranks gather different weights (docs/checks.md)",
    signal.SIGTERM: "scancel or a time limit ended it before it could handle the signal",
}
"""The usual cause of a signal that ends a rank."""


def pending(reason: str) -> str:
    """Explain why a job waits; squeue's reason may have details after a comma."""
    word = reason.strip("()").partition(",")[0]
    if word in PENDING:
        return PENDING[word]
    if word.startswith(("QOS", "Assoc", "Max")):
        limit = next((text for part, text in LIMITS.items() if part in word), "a limit")
        owner = {"Q": "its QOS", "A": "its account"}.get(word[0], "the site")
        return f"{word}: {owner} limits {limit}"
    return word


def is_held(reason: str) -> bool:
    """Return True if a job does not start by itself, whatever time Slurm expects."""
    return any(word in pending(reason) for word in ("held", "holds it", "never starts"))


def ended(state: str) -> str:
    """Explain how Slurm ended a job, by its state."""
    return ENDED.get(state, f"Slurm says {state}")


def signal_of(exit_code: int) -> int | None:
    """Return the signal that an exit code means; None for a program's own code, such as 255."""
    return exit_code - 128 if exit_code - 128 in signal.valid_signals() else None


def of_signal(number: int) -> tuple[str, str]:
    """Return a signal's name and what usually causes it; empty if nothing does."""
    try:
        known = signal.Signals(number)
    except ValueError:  # a real-time signal, of which only the first and the last have names
        return f"signal {number}", ""
    return known.name, SIGNALS.get(known, "")
