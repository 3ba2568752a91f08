"""Choose the torch build for this machine: by the NVIDIA driver, unless ROLLCALL_TORCH is set.

A choice is written ``[VERSION+]BUILD``: ``default`` (the package registry's build), ``cpu``,
``cu128``, ``2.11.0+cu128``. This file uses only the standard library: nothing is installed yet.
"""

import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

INDEX = "https://download.pytorch.org/whl/"  # PyTorch's own wheel index: one folder per build
REGISTRY = "https://pypi.org/simple/"
PROBE_S = 4.0

# Oldest Linux driver for each build, newest build first (NVIDIA's CUDA release notes, table 2). The
# registry's default build has used CUDA 13 since torch 2.11. cu128 is the first to support
# Blackwell GPUs, which need driver 570. CUDA 12 does not load with a driver below 525.
BUILDS = ((580, "default"), (570, "cu128"), (525, "cu126"))

REQUEST = re.compile(
    r"(?:(\d+(?:\.\d+)*(?:[a-z]+\d+)*)(?:\+|$))?\+?(default|cpu|cu\d+|rocm[\d.]+|xpu)?"
)


# Variables and files of pip and uv that may name another registry, or a folder of wheels.
SOURCES = (
    *("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_NO_INDEX"),
    *("UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX"),
    *("UV_INDEX_URL", "UV_NO_INDEX", "UV_OFFLINE"),
)
FILES = [f"{sys.prefix}/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf"]
FILES += ["/etc/pip.conf", "/etc/xdg/pip/pip.conf", "/etc/uv/uv.toml", "~/.config/uv/uv.toml"]


class CannotBuild(Exception):
    """The environment cannot be made; the message gives the cause and the remedy."""


def parse(request: str) -> tuple[str, str]:
    """Split ROLLCALL_TORCH into version and build, each of which may be empty.

    Raises:
        CannotBuild: the request is malformed, or torch is not made so.
    """
    match = REQUEST.fullmatch(request)
    if not match:
        raise CannotBuild(
            f"ROLLCALL_TORCH={request}: expected [VERSION][+BUILD], such as 2.11.0, cpu, cu128, "
            "2.11.0+cu128 or default."
        )
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    [oldest] = re.findall(r'"torch>=([\d.]+)"', project.read_text())
    if match[1] and _numbers(match[1]) < _numbers(oldest):
        raise CannotBuild(f"ROLLCALL_TORCH={request}: rollcall needs torch {oldest} or newer.")
    builds = [name for _, name in BUILDS[1:]]  # torch of that age has none for an older CUDA
    if (match[2] or "").startswith("cu") and int(match[2][2:]) < int(builds[-1][2:]):
        raise CannotBuild(
            f"ROLLCALL_TORCH={request}: torch {oldest} and newer have no build {match[2]}. "
            f"Choose cpu, default, or one of {', '.join(builds)}."
        )
    return match[1] or "", match[2] or ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def is_reachable(build: str) -> bool:
    """Return True if packages can be downloaded; raise CannotBuild if the build does not exist.

    If the settings of pip or uv name another registry, assume that it answers.
    """
    root = os.environ.get("ROLLCALL_SYSROOT", "")
    files = (Path((root if name[0] == "/" else "") + name).expanduser() for name in FILES)
    if any(map(os.environ.get, SOURCES)) or any(file.exists() for file in files):
        return True
    url = REGISTRY if build == "default" else f"{INDEX}{build}/torch/"
    status = _status(url)
    if status in (403, 404) and build != "default":
        raise CannotBuild(
            f"ROLLCALL_TORCH asks for the build {build}, and {url} does not exist ({status}). "
            f"Choose cpu, default, or one of {', '.join(name for _, name in BUILDS[1:])}."
        )
    return status is not None


def build_for(driver: str) -> str:
    """Return the newest build for an NVIDIA driver; raise CannotBuild if it is too old for all."""
    major = int(driver.split(".")[0])
    for oldest, build in BUILDS:
        if major >= oldest:
            return build
    needs = f"{BUILDS[-1][0]} or newer ({BUILDS[0][0]} for the registry's default build)"
    advice = "Update the driver, or train on the CPU with ROLLCALL_TORCH=cpu."
    raise CannotBuild(f"the NVIDIA driver {driver} is too old: torch needs {needs}. {advice}")


def choose(request: str, driver: str, ready: Iterable[str], say: Callable[[str], None]) -> str:
    """Turn a request into a complete choice.

    Args:
        request: ROLLCALL_TORCH, or an empty string.
        driver: the NVIDIA driver's version as the kernel reports it, or an empty string.
        ready: the choices for which an environment exists.

    Raises:
        CannotBuild: the request is malformed or the driver too old.
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
        say("no NVIDIA driver, but this Slurm cluster has GPUs: using the registry's CUDA build")
        return "default"
    # Without a driver any build works. A node without a network must not try to make another one.
    for build in ("cpu", "default"):
        if prefix + build in ready:
            return build
    if _status(f"{INDEX}cpu/torch/") == 200:
        return "cpu"
    say(f"no NVIDIA driver, and {INDEX}cpu does not answer: using the registry's default build")
    return "default"


def _driver_of_nvidia_smi() -> str:
    # In WSL and some containers the kernel's files are missing, but nvidia-smi may work.
    output = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = re.search(r"^\d{3,}(\.\d+)+$", output, re.MULTILINE)
    return version[0] if version else ""


def _output(*command: str) -> str:
    # The output of a probe; empty if the program is missing, fails or hangs.
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""


def _status(url: str) -> int | None:
    """Return the status with which a server answers; None if it does not answer soon."""
    statuses: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_S) as answer:
                statuses.append(answer.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
        except OSError:
            pass

    # In a thread, because urlopen's timeout does not cover the name lookup.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return next(iter(statuses), None)
