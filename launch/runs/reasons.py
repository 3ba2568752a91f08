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
"""Why a job waits, by the reason that squeue shows."""
LIMITS = {
    "PerUser": "what each user may have at once",
    "PerAccount": "what each account may have at once",
    "PerJob": "what one job may have",
    "PerNode": "what one job may have on a node",
    "Grp": "what the group may have at once",
    "Max": "the most that is allowed",
}
"""What a limit applies to, by a part of its name."""
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
    signal.SIGSEGV: "a bug in native code, often libraries built for different versions",
    signal.SIGBUS: "usually a full /dev/shm, or a mapped file that was truncated",
    signal.SIGILL: "code built for another CPU",
    signal.SIGFPE: "a division by zero in native code",
    signal.SIGABRT: "native code gave up, see the log; NCCL does this when it loses a peer",
    signal.SIGTERM: "scancel or a time limit ended it before it could handle the signal",
}
"""What usually causes a signal that ends a rank."""


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


def ended(state: str) -> str:
    """Explain how Slurm ended a job, by its state."""
    return ENDED.get(state, f"Slurm says {state}")


def signal_of(exit_code: int) -> int | None:
    """Return the signal that an exit code means; None for a program's own code, such as 255."""
    return exit_code - 128 if exit_code - 128 in signal.valid_signals() else None


def of_signal(number: int) -> tuple[str, str]:
    """Return a signal's name and what usually causes it; empty if nothing does."""
    try:
        found = signal.Signals(number)
    except ValueError:  # a real-time signal, of which only the first and the last have names
        return f"signal {number}", ""
    return found.name, SIGNALS.get(found, "")
