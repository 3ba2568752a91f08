"""The power of a lab's host: switched off, everything on it dies at once; on, it comes back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lab import Lab, wait_until


def off(lab: Lab, host: str) -> None:
    """Let a host die, with all that runs on it; its namespaces stay."""
    # Stopped first: no daemon is to tell Slurm how another process ended.
    for pid in freeze(lab, host):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def freeze(lab: Lab, host: str) -> list[int]:
    """Let a host hang with all that runs on it; the ids of its processes, for `thaw`."""
    found = _victims(lab, host)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return found


def thaw(pids: list[int]) -> None:
    """Let a host that hangs go on."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_on(lab: Lab, host: str) -> bool:
    """Whether the host's Slurm daemon runs."""
    names = (process / "comm" for process in _processes(lab, host))
    return any(name.read_text().strip() == "slurmd" for name in names)


def on(lab: Lab, host: str) -> None:
    """Start the host's Slurm daemon again, and wait until Slurm counts on it."""
    path = f"PATH={os.environ['PATH']}:/usr/sbin:/sbin"
    conf = f"SLURM_CONF={place(lab) / 'slurm.conf'}"
    daemon = ["env", "-i", path, "LANG=C.UTF-8", conf, "setsid", "slurmd", "-D"]
    null = subprocess.DEVNULL
    subprocess.Popen(lab.argv(host, *daemon), stdin=null, stdout=null, stderr=null, cwd="/")

    def state() -> str:
        return lab.output("login", "sinfo", "-h", f"--nodes={host}", "--partition=main", "-o%T")

    up = ("idle", "mixed", "allocated")
    wait_until(lambda: state() in up, 120, lambda: f"{host} is {state()}")


def _victims(lab: Lab, host: str) -> list[int]:
    """All of the host's processes but the one that keeps its namespaces."""
    keeper = (place(lab) / "hosts" / host / "pid").read_text().strip()
    return [int(process.name) for process in _processes(lab, host) if process.name != keeper]


def _processes(lab: Lab, host: str) -> Iterator[Path]:
    """In /proc."""
    mark = f" rollcall-lab:{lab.name}:{host} "
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if mark in (process / "mountinfo").read_text():
                yield process


def place(lab: Lab) -> Path:
    """The directory of a lab: its configuration, its logs, its hosts."""
    return Path("/var/lib/rollcall-lab") / lab.name
