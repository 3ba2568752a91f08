"""Which torch build fits this machine: the driver decides, ROLLCALL_TORCH overrides.

A choice is written ``[VERSION+]BUILD``: ``default`` (what the registry offers), ``cpu``,
``cu128``, ``2.11.0+cu128``. Only the standard library is used here: nothing is installed yet.
"""

import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterable

INDEX = "https://download.pytorch.org/whl/"  # PyTorch's own wheel index: one folder per build
PROBE_S = 4.0

# Oldest Linux driver of each build, newest build first (NVIDIA's CUDA release notes, table 2). The
# registry's default has been CUDA 13 since torch 2.11; cu128 is the first with Blackwell, which
# needs 570. Below 525, CUDA 12 does not load.
BUILDS = ((580, "default"), (570, "cu128"), (525, "cu126"))

REQUEST = re.compile(
    r"(?:(\d+(?:\.\d+)*(?:[a-z]+\d+)*)(?:\+|$))?\+?(default|cpu|cu\d+|rocm[\d.]+|xpu)?"
)


class CannotBuild(Exception):
    """The environment cannot be made; the message names the cause and the cure."""


def parse(request: str) -> tuple[str, str]:
    """Split ROLLCALL_TORCH into version and build; either may be empty.

    Raises:
        CannotBuild: when it is not of the form ``[VERSION][+BUILD]``.
    """
    match = REQUEST.fullmatch(request)
    if not match:
        raise CannotBuild(
            f"ROLLCALL_TORCH={request} is not of the form [VERSION][+BUILD], such as 2.11.0, cpu, "
            "cu128, 2.11.0+cu128 or default."
        )
    return match[1] or "", match[2] or ""


def build_for(driver: str) -> str:
    """Name the newest build that an NVIDIA driver supports.

    Raises:
        CannotBuild: when the driver is older than every build of torch that we support.
    """
    major = int(driver.split(".")[0])
    for oldest, build in BUILDS:
        if major >= oldest:
            return build
    raise CannotBuild(
        f"the NVIDIA driver {driver} is too old: torch needs {BUILDS[-1][0]} or newer "
        f"({BUILDS[0][0]} for the registry's default build). Update the driver, or train on the "
        "CPU with ROLLCALL_TORCH=cpu."
    )


def choose(request: str, driver: str, ready: Iterable[str], say: Callable[[str], None]) -> str:
    """Complete a request to a choice.

    Args:
        request: ROLLCALL_TORCH, or nothing.
        driver: the NVIDIA driver's version as the kernel tells it, or nothing.
        ready: the choices for which an environment is ready.
        say: shows one line to the user.

    Raises:
        CannotBuild: when the request is malformed or the driver too old.
    """
    version, build = parse(request)
    prefix = f"{version}+" if version else ""
    return prefix + (build or _fitting_build(prefix, driver or _driver_of_nvidia_smi(), ready, say))


def _fitting_build(
    prefix: str, driver: str, ready: Iterable[str], say: Callable[[str], None]
) -> str:
    if driver:
        return build_for(driver)
    if "SLURM_JOB_ID" not in os.environ and "gpu" in _output("sinfo", "-h", "-o", "%G"):
        say("no NVIDIA driver, but this Slurm cluster has GPUs: taking the registry's CUDA build")
        return "default"
    # Any build serves without a driver. A node without network must not try to make another one.
    for build in ("cpu", "default"):
        if prefix + build in ready:
            return build
    if _answers(f"{INDEX}cpu/torch/"):
        return "cpu"
    say(f"no NVIDIA driver, and {INDEX}cpu does not answer: taking the registry's default build")
    return "default"


def _driver_of_nvidia_smi() -> str:
    # Where the kernel's files do not show it (WSL, some containers), nvidia-smi may know.
    found = re.search(
        r"^\d{3,}(\.\d+)+$",
        _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        re.MULTILINE,
    )
    return found[0] if found else ""


def _output(*command: str) -> str:
    # What a probe prints, nothing when the program is missing, fails or hangs.
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _answers(url: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_S):
                answered.set()
        except OSError:
            pass

    # In a thread, because urlopen's timeout does not cover the name look-up.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return answered.is_set()
