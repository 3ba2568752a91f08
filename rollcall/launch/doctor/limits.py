"""Limits of processes and of memory."""

import os
import resource

from rollcall.launch.doctor.check import LocalNode, Result, State, judge, warn
from rollcall.messages.text import size

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


def memory(node: LocalNode) -> Result:
    total, free = _meminfo(node, "MemTotal"), _meminfo(node, "MemAvailable")
    text = f"{size(free)} of {size(total)} free"
    return warn(free < total // 10 and text, text)._replace(value=total, within=total * 0.03)


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return 2**62 if soft == resource.RLIM_INFINITY else soft


def _meminfo(node: LocalNode, name: str) -> int:
    lines = (line.split() for line in node.read("/proc/meminfo").splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == f"{name}:"), 0)
