"""CPUs, and who uses them."""

import os
import re
import time
from pathlib import Path

import psutil

from rollcall.launch.doctor.check import Found, Node, Skip, State, judge, warn
from rollcall.text import listed

SAMPLE = 0.7
"""Seconds for which the use of CPUs is measured."""
MUCH = 0.3
"""CPUs that a foreign process may use; on a busy machine a loop gets less than a whole one."""


def cpus(node: Node) -> Found:
    usable = len(os.sched_getaffinity(0))
    asked = node.env.get("SLURM_CPUS_PER_TASK") or node.env.get("SLURM_CPUS_ON_NODE") or "0"
    few = asked.isdecimal() and usable < min(int(asked), os.cpu_count() or 1)
    text = f"{usable} of {os.cpu_count()}"
    return judge(few and f"{text}, though Slurm gave {asked}", text, text)


def threads(node: Node) -> Found:
    usable, given = len(os.sched_getaffinity(0)), node.env.get("OMP_NUM_THREADS", "0")
    many = given.isdecimal() and int(given) > usable
    return warn(many and f"OMP_NUM_THREADS={given} on {usable} CPUs", "no more than CPUs", given)


def numa(node: Node) -> Found:
    folders = node.paths("/sys/devices/system/node/node[0-9]*")
    used = [it for it in folders if _cpus(node, f"{it}/cpulist") & os.sched_getaffinity(0)]
    devices = node.paths("/sys/bus/pci/drivers/nvidia/*:*")
    near = {it: _cpus(node, f"{it}/local_cpulist") for it in devices}
    far = [it[-12:] for it, cpus in near.items() if cpus and not cpus & os.sched_getaffinity(0)]
    text = f"CPUs of {len(used)} of {len(folders)} NUMA nodes"
    return warn(far and f"{text}; none is near GPU {listed(far, 2)}", text, f"{len(folders)}")


def memory_errors(node: Node) -> Found:
    counts = [node.read(it) for it in node.paths("/sys/devices/system/edac/mc/mc*/ue_count")]
    if not (known := [int(count) for count in counts if count.isdecimal()]):
        raise Skip("the kernel does not count them (EDAC)")
    return judge(any(known) and f"{sum(known)} uncorrected", "none")


def foreign_processes(node: Node) -> Found:
    before, begin = _use(node), time.monotonic()
    time.sleep(SAMPLE)
    busy, total = [], 0.0
    for pid, (used, name) in _use(node).items():
        share = (used - before.get(pid, (used, ""))[0]) / (time.monotonic() - begin)
        if share > MUCH:
            busy.append(f"{name} ({pid}) uses {share:.1f} CPUs")
            total += share
    # Where the job has only a part of the node, other jobs may use the rest.
    there = os.cpu_count() or 1
    # Of the job, such as 64(x2),32: the step that runs this may have a single CPU.
    counts = re.findall(r"(?:^|,)(\d+)", node.env.get("SLURM_JOB_CPUS_PER_NODE", "0"))
    is_whole = min(map(int, counts), default=0) >= there
    state: State = "bad" if is_whole and total > there / 10 else "warning"
    return judge(listed(sorted(busy), 3), "none uses the CPUs", "busy" if busy else "idle", state)


def earlier_jobs(node: Node) -> Found:
    job = node.env.get("SLURM_JOB_ID")
    if job is None:
        raise Skip("Slurm did not start this")
    own = (it for it in psutil.process_iter(["name", "uids"]) if it.info["uids"] is not None)
    mine = {it.pid: it.info["name"] for it in own if it.info["uids"].real == os.getuid()}
    jobs = {pid: _job_of(pid) for pid in mine if _is_here(pid)}
    left = [f"{mine[pid]} ({pid}) of job {it}" for pid, it in jobs.items() if it not in ("", job)]
    return warn(listed(left, 3), "no process of another job of yours")


def _use(node: Node) -> dict[int, tuple[float, str]]:
    """Return the CPU seconds and the name of each process that is not part of this job."""
    here, job = psutil.Process(), node.env.get("SLURM_JOB_ID")
    own = {it.pid for it in (here, *here.parents(), *here.children(recursive=True))}
    found = {}
    for it in psutil.process_iter(["name", "cpu_times"]):
        times = it.info["cpu_times"]
        is_own = it.pid in own or (job is not None and _job_of(it.pid) == job)
        if times is not None and not is_own and _is_here(it.pid):
            found[it.pid] = (times.user + times.system, it.info["name"])
    return found


def _is_here(pid: int) -> bool:
    """Whether a process belongs to this host; the hosts of a lab share a table of processes."""
    try:
        return Path(f"/proc/{pid}/ns/uts").samefile("/proc/self/ns/uts")
    except OSError:
        return True  # another user's


def _job_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = b"SLURM_JOB_ID="
    return next((word[len(name) :].decode() for word in words if word.startswith(name)), "")


def _cpus(node: Node, path: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, node.read(path).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
