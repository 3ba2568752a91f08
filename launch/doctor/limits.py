"""Limits of processes and of memory."""

import os
import resource

from rollcall.launch.doctor.check import Found, Node, Skip, State, judge, warn
from rollcall.text import size

GIB = 2**30


def locked_memory(node: Node) -> Found:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if limit > 2**50 else size(limit)
    return judge(bool(node.paths("/sys/class/infiniband/*")) and limit < GIB and text, text, text)


def open_files(_node: Node) -> Found:
    limit = _limit(resource.RLIMIT_NOFILE)
    state: State = "bad" if limit < 1024 else "warning"
    return judge(limit < 4096 and f"{limit}", f"{limit:,}", f"{limit}", state)


def core_files(node: Node) -> Found:
    pattern, limit = node.read("/proc/sys/kernel/core_pattern"), _limit(resource.RLIMIT_CORE)
    fills = limit > GIB and not pattern.startswith("|")
    return warn(fills and f"a crashed rank writes its memory to '{pattern}'", size(limit))


def shared_memory(_node: Node) -> Found:
    place = os.statvfs("/dev/shm")
    total, free = place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize
    text = f"{size(free)} of {size(total)} free"
    # Usually half of the memory, of which similar machines have not quite the same.
    problem = (total < GIB or free < GIB // 4) and text
    return judge(problem, text)._replace(value=total, within=total * 0.03)


def memory(node: Node) -> Found:
    total, free = _meminfo(node, "MemTotal"), _meminfo(node, "MemAvailable")
    text = f"{size(free)} of {size(total)} free"
    return warn(free < total // 10 and text, text)._replace(value=total, within=total * 0.03)


def memory_of_job(node: Node) -> Found:
    limit = node.cgroup("memory.max")
    if not limit.isdecimal():
        raise Skip("no control group limits the memory")
    lines = (line.split() for line in node.cgroup("memory.stat").splitlines())
    # Without the cache of files, which the kernel drops when the memory is needed.
    used = sum(int(count) for name, count in lines if name in ("anon", "shmem"))
    text = f"{size(used)} of {size(int(limit))} used"
    return judge(used > 0.8 * int(limit) and text, text, size(int(limit)))


def huge_pages(node: Node) -> Found:
    unused = _meminfo(node, "HugePages_Free") // 1024 * _meminfo(node, "Hugepagesize")
    mode = node.read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    wasted = unused > _meminfo(node, "MemTotal") // 4
    return warn(wasted and f"{size(unused)} are reserved and unused", mode, mode)


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return 2**62 if soft == resource.RLIM_INFINITY else soft


def _meminfo(node: Node, name: str) -> int:
    lines = (line.split() for line in node.read("/proc/meminfo").splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == f"{name}:"), 0)
