"""Start and use a Slurm cluster of several hosts on this machine: slurm/lab from Python."""

import atexit
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from checkout import ROOT

COMMANDS = ROOT / "slurm" / "lab"
CANNOT = 3  # exit code of `up` if a package or a permission is missing
BOTH_TRACKERS = pytest.mark.parametrize(
    "proctrack", ["cgroup", "linuxproc"], indirect=True, scope="session"
)
"""For tests of signals, requeues and kills, which reach other processes with each tracker."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}


class Lab:
    """A running lab. Its hosts are `login` and the nodes `n1`, `n2`, …"""

    def __init__(self, name: str):
        self.name = name

    def argv(self, host: str, *command: str) -> list[str]:
        """Return the command line that runs `command` on `host`, for subprocess.Popen."""
        return [str(COMMANDS / "exec"), "--name", self.name, host, *command]

    def exec(
        self,
        host: str,
        *command: str,
        timeout: float = 500,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on `host`; `env` is added to this process's environment.

        Raises subprocess.TimeoutExpired after `timeout` seconds.
        """
        return subprocess.run(
            self.argv(host, *command),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | dict(env or {}),
            cwd=cwd,
            check=False,
        )

    def output(self, host: str, *command: str, timeout: float = 500) -> str:
        """Return what `command` prints on `host`; fail the test unless it exits with 0."""
        result = self.exec(host, *command, timeout=timeout)
        assert result.returncode == 0, f"{host}: {command} -> {result.returncode}: {result.stderr}"
        return result.stdout.strip()

    def job(self, job_id: str, field: str) -> str:
        """Return one field of `scontrol show job`, such as JobState or Restarts."""
        fields = self.output("login", "scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(item.split("=", 1) for item in fields if "=" in item)[field]

    def has(self, process: int, host: str = "") -> bool:
        """Return True if a process runs on a host of this lab, and not of another one."""
        with suppress(OSError):  # it has ended
            mounts = Path(f"/proc/{process}/mountinfo").read_text()
            return f"rollcall-lab:{self.name}:{host and host + ' '}" in mounts
        return False

    def wait_job(self, job_id: str, timeout: float = 500) -> str:
        """Wait until the job has ended, including requeues, and return its state."""

        def state() -> str:
            return self.job(job_id, "JobState")

        wait_until(lambda: state() in ENDED, timeout, lambda: f"job {job_id} is {state()}")
        return state()


def wait_until(condition: Callable[[], bool], timeout: float, complaint: Callable[[], str]) -> None:
    """Poll until `condition` is true; raise TimeoutError with the complaint after `timeout` s."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout} s {complaint()}")
        time.sleep(0.1)


@contextmanager
def running_lab(name: str, *options: str) -> Iterator[Lab]:
    """Start a lab with `options` of slurm/lab/up, and always stop it.

    If a package or a permission is missing, the test is skipped; in CI it fails.
    """

    def take_down() -> subprocess.CompletedProcess[str]:
        return run_command("down", "--name", name)

    atexit.register(take_down)  # in case pytest exits without tearing down its fixtures
    try:
        up = run_command("up", "--name", name, *options)
        if up.returncode == CANNOT and os.environ.get("CI") != "true":
            pytest.skip(f"{up.stderr.strip()}\nThen: sudo ./env/run pytest tests/slurm")
        assert up.returncode == 0, up.stderr
        yield Lab(name)
        assert take_down().returncode == 0
    finally:
        take_down()
        atexit.unregister(take_down)


def run_command(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one of the lab's commands: up, down or status."""
    return subprocess.run(
        [str(COMMANDS / command), *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
