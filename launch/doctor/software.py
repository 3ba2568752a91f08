"""Python, packages, code, and what Slurm and the environment left for the job."""

import json
import os
import re
import sys
import zlib
from itertools import islice
from pathlib import Path

from rollcall.installation import ROOT
from rollcall.launch.doctor.check import Found, Node, Skip, judge, ok, warn
from rollcall.launch.scheduler import cluster
from rollcall.text import listed

LEAVE_OUT = {"runs", "node_modules", "__pycache__", "site-packages", "data"}
MOST_FILES, MOST_FOLDERS = 3000, 1000
PACKAGES = """
import json
from importlib import metadata
print(json.dumps({it.metadata["Name"] or "": it.version for it in metadata.distributions()}))
"""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK")
TESTED = (20, 11)
"""The oldest Slurm with which rollcall is tested."""


def python(_node: Node) -> Found:
    text = f"{sys.version.split()[0]} in {sys.prefix}"
    return ok(text, text)


def packages(node: Node) -> Found:
    found: dict[str, str] = json.loads(node.run(node.python, "-c", PACKAGES))
    return ok(f"{len(found)} packages", found)


def code(_node: Node) -> Found:
    digests: dict[str, int] = {}
    count = 0
    for root in dict.fromkeys((Path.cwd(), ROOT)):
        inside = root / "rollcall" if root.name == "site-packages" else root
        for folder, folders, files in islice(os.walk(inside), MOST_FOLDERS):
            hidden = {name for name in folders if name.startswith(".")}
            folders[:] = sorted({*folders} - LEAVE_OUT - hidden)
            for name in sorted(files):
                if name.endswith(".py") and count < MOST_FILES:
                    digest, count = zlib.crc32(name.encode(), digests.get(folder, 0)), count + 1
                    digests[folder] = zlib.crc32(_bytes(Path(folder, name)), digest)
    return ok(f"{count} files", {folder: f"{digest:08x}" for folder, digest in digests.items()})


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a link to nowhere, such as the lock of an editor
        return b""


def torch(node: Node) -> Found:
    version = str(node.torch()["torch"])
    return ok(version, version)


def slow_import(node: Node) -> Found:
    seconds = float(node.torch()["seconds"])
    return warn(seconds > 30 and f"torch takes {seconds:.0f} s", f"torch takes {seconds:.1f} s")


def cuda_build(node: Node) -> Found:
    found = node.torch()
    gpus = node.paths("/proc/driver/nvidia/version")
    if not gpus:
        raise Skip("this machine has no NVIDIA driver")
    needs = found["cuda"]
    if not needs:
        return Found("bad", f"torch {found['torch']} has no CUDA", "none")
    match = re.search(r"CUDA Version: (\d+)\.(\d+)", node.run("nvidia-smi"))
    old = match is not None and int(match[1]) < int(str(needs).partition(".")[0])
    text = f"torch's CUDA is {needs}, the driver's {match[1] if match else 'unknown'}"
    blind = found["gpus"] == 0 and "torch sees no GPU"
    return judge((old and text) or blind, text, str(needs))


def search_paths(node: Node) -> Found:
    given = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")
    found = [f"{name}={node.env[name]}" for name in given if node.env.get(name)]
    cuda = [part for part in node.env.get("LD_LIBRARY_PATH", "").split(":") if "cuda" in part]
    found += [f"LD_LIBRARY_PATH has {cuda[0]}"] if cuda else []
    return warn("; ".join(found), "no variable changes what is imported")


def leaked_variables(node: Node) -> Found:
    of_rank = () if "SLURM_STEP_ID" in node.env else OF_RANKS  # a step has such variables itself
    found = [it for it in node.env if it.startswith("TORCHELASTIC_") or it in of_rank]
    return warn(listed(sorted(found)), "none of a surrounding rank")


def container(node: Node) -> Found:
    marks = {"docker": ".dockerenv", "podman": "run/.containerenv", "apptainer": ".singularity.d"}
    found = [name for name, path in marks.items() if node.paths(path)]
    found += [name for name in ("enroot", "pyxis") if f"{name.upper()}_VERSION" in node.env]
    text = ", ".join(found) or "none"
    return ok(text, text)


def slurm_version(_node: Node) -> Found:
    version = cluster.version()
    if version is None:
        raise Skip("this machine has no Slurm")
    text = f"{version[0]}.{version[1]:02d}"
    return warn(version < TESTED and f"{text}: rollcall is tested from 20.11 on", text, text)
