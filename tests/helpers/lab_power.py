"""Switch a host of the lab off and on: all its processes die at once, and Slurm starts again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lab import Lab, wait_until


def off(lab: Lab, host: str) -> None:
    """Kill all processes of a host at once; its namespaces stay."""
    # Stop all first, so that no daemon reports to Slurm how another process ended.
    for pid in freeze(lab, host):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def freeze(lab: Lab, host: str) -> list[int]:
    """Stop all processes of a host; return their ids for `thaw`."""
    found = _victims(lab, host)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return found


def thaw(pids: list[int]) -> None:
    """Continue the processes of a frozen host."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_on(lab: Lab, host: str) -> bool:
    """Return whether the host's Slurm daemon is running."""
    names = (process / "comm" for process in _processes(lab, host))
    return any(name.read_text().strip() == "slurmd" for name in names)


def on(lab: Lab, host: str) -> None:
    """Start the host's Slurm daemon, and wait until Slurm considers the host up."""
    path = f"PATH={os.environ['PATH']}:/usr/sbin:/sbin"
    conf = f"SLURM_CONF={place(lab) / 'slurm.conf'}"
    daemon = ["env", "-i", path, "LANG=C.UTF-8", conf, "setsid", "slurmd", "-D"]
    null = subprocess.DEVNULL
    subprocess.Popen(lab.argv(host, *daemon), stdin=null, stdout=null, stderr=null, cwd="/")

    def state() -> str:
        return lab.output("login", "sinfo", "-h", f"--nodes={host}", "--partition=main", "-o%T")

    up = ("idle", "mixed", "allocated")
    wait_until(lambda: state() in up, 500, lambda: f"{host} is {state()}")


def _victims(lab: Lab, host: str) -> list[int]:
    """The ids of all processes of a host, except the one that keeps its namespaces."""
    keeper = (place(lab) / "hosts" / host / "pid").read_text().strip()
    return [int(process.name) for process in _processes(lab, host) if process.name != keeper]


def _processes(lab: Lab, host: str) -> Iterator[Path]:
    """The directories in /proc of a host's processes."""
    mark = f" rollcall-lab:{lab.name}:{host} "
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if mark in (process / "mountinfo").read_text():
                yield process


def place(lab: Lab) -> Path:
    """The directory with the lab's configuration, logs and hosts."""
    return Path("/var/lib/rollcall-lab") / lab.name
