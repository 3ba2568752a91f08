"""CPUs and the processes that use them, memory, and limits."""

import os
import re
import resource
import time
from pathlib import Path

import psutil

from rollcall.launch.doctor.check import LocalNode, Result, Skip, State, judge, warn
from rollcall.messages.text import size

SAMPLE = 0.7
"""Seconds for which the use of CPUs is measured."""
MUCH, MANY = 0.4, 100
"""CPUs that other processes may use together; processes that may wait to be collected."""
GIB = 2**30


def locked_memory(node: LocalNode) -> Result:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if limit > 2**50 else size(limit)
    return judge(bool(node.paths("/sys/class/infiniband/*")) and limit < GIB and text, text, text)


def open_files(_node: LocalNode) -> Result:
    limit = _limit(resource.RLIMIT_NOFILE)
    state: State = "bad" if limit < 1024 else "warning"
    return judge(limit < 4096 and f"{limit}", f"{limit:,}", f"{limit}", state)


def shared_memory(_node: LocalNode) -> Result:
    blocks = os.statvfs("/dev/shm")
    total, free = blocks.f_blocks * blocks.f_frsize, blocks.f_bavail * blocks.f_frsize
    text = f"{size(free)} of {size(total)} free"
    # The size is usually half of the memory, which differs a little between similar machines.
    problem = (total < GIB or free < GIB // 4) and text
    return judge(problem, text)._replace(value=total, within=total * 0.03)


def memory(_node: LocalNode) -> Result:
    there = psutil.virtual_memory()
    text = f"{size(there.available)} of {size(there.total)} free"
    few = there.available < there.total // 10 and text
    return warn(few, text)._replace(value=there.total, within=there.total * 0.03)


def cpus(node: LocalNode) -> Result:
    usable = len(os.sched_getaffinity(0))
    asked = node.env.get("SLURM_CPUS_PER_TASK") or node.env.get("SLURM_CPUS_ON_NODE") or "0"
    few = asked.isdecimal() and usable < min(int(asked), os.cpu_count() or 1)
    text = f"{usable} of {os.cpu_count()}"
    return judge(few and f"{text}, though Slurm gave {asked}", text, text)


def memory_errors(node: LocalNode) -> Result:
    counts = [node.read(path) for path in node.paths("/sys/devices/system/edac/mc/mc*/ue_count")]
    if not (known := [int(count) for count in counts if count.isdecimal()]):
        raise Skip("the kernel does not count them (EDAC)")
    return judge(any(known) and f"{sum(known)} uncorrected", "none")


def foreign_processes(node: LocalNode) -> Result:
    before, begin = _use(node), time.monotonic()
    time.sleep(SAMPLE)
    after, seconds = _use(node), time.monotonic() - begin
    shares = {
        pid: (used - before.get(pid, (used, ""))[0]) / seconds for pid, (used, _) in after.items()
    }
    total = sum(shares.values())  # many small ones count, too
    most = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    named = ", ".join(f"{after[pid][1]} ({pid}) {shares[pid]:.1f}" for pid in most)
    busy = total > MUCH and f"other processes use {total:.1f} CPUs: {named}"
    # If the job has only a part of the node, other jobs may use the rest.
    present = os.cpu_count() or 1
    # The job's CPUs, such as 64(x2),32: the step that runs this may have a single CPU.
    counts = re.findall(r"(?:^|,)(\d+)", node.env.get("SLURM_JOB_CPUS_PER_NODE", "0"))
    is_whole = min(map(int, counts), default=0) >= present
    state: State = "bad" if is_whole and total > present / 10 else "warning"
    return judge(busy, "none uses the CPUs", "busy" if busy else "idle", state)


def zombies(_node: LocalNode) -> Result:
    states = (process.info["status"] for process in psutil.process_iter(["status"]))
    count = sum(state == psutil.STATUS_ZOMBIE for state in states)
    return warn(count > MANY and f"{count} processes have ended and are not collected", count)


def _use(node: LocalNode) -> dict[int, tuple[float, str]]:
    """Return the CPU seconds and the name of each process that is not part of this job."""
    this, job = psutil.Process(), node.env.get("SLURM_JOB_ID")
    family = {relative.pid for relative in (this, *this.parents(), *this.children(recursive=True))}
    use = {}
    for process in psutil.process_iter(["name", "cpu_times", "environ"]):
        pid, times = process.pid, process.info["cpu_times"]
        environ = process.info["environ"] or {}  # None for another user's
        is_of_job = pid in family or (job is not None and job == environ.get("SLURM_JOB_ID"))
        if times is not None and not is_of_job and _is_here(pid):
            use[pid] = (times.user + times.system, process.info["name"])
    return use


def _is_here(pid: int) -> bool:
    """Return True for a process of this host; the hosts of a lab share a table of processes."""
    try:
        return Path(f"/proc/{pid}/ns/uts").samefile("/proc/self/ns/uts")
    except OSError:
        return True  # another user's


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return 2**62 if soft == resource.RLIM_INFINITY else soft
