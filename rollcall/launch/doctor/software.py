"""Python, packages and code, Slurm, and variables of the environment."""

import json
import os
import re
import sys
import zlib
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rollcall.cli.installation import ROOT
from rollcall.launch.doctor.check import LocalNode, Result, Skip, judge, warn
from rollcall.launch.scheduler import cluster
from rollcall.messages.text import listed

MOST_FILES, MOST_FOLDERS = 3000, 1000
PACKAGES = """
import json
from importlib import metadata
print(json.dumps({d.metadata["Name"] or "": d.version for d in metadata.distributions()}))
"""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK")


def python(_node: LocalNode) -> Result:
    text = f"{sys.version.split()[0]} in {sys.prefix}"
    return Result("ok", text, text)


def packages(node: LocalNode) -> Result:
    versions: dict[str, str] = json.loads(node.run(node.python, "-c", PACKAGES))
    return Result("ok", f"{len(versions)} packages", versions)


def code(_node: LocalNode) -> Result:
    leave_out = {"runs", "node_modules", "__pycache__", "site-packages", "data"}
    digests: dict[str, int] = {}
    count = 0
    for root in dict.fromkeys((Path.cwd(), ROOT)):
        inside = root / "rollcall" if root.name == "site-packages" else root
        for folder, folders, files in islice(os.walk(inside), MOST_FOLDERS):
            hidden = {name for name in folders if name.startswith(".")}
            folders[:] = sorted({*folders} - leave_out - hidden)
            for name in sorted(files):
                if name.endswith(".py") and count < MOST_FILES:
                    count += 1
                    digests[folder] = zlib.crc32(name.encode(), digests.get(folder, 0))
                    with suppress(OSError):  # a link to nowhere, such as the lock of an editor
                        text = Path(folder, name).read_bytes()
                        digests[folder] = zlib.crc32(text, digests[folder])
    return Result(
        "ok", f"{count} files", {folder: f"{digest:08x}" for folder, digest in digests.items()}
    )


def torch(node: LocalNode) -> Result:
    version = str(node.torch()["torch"])
    return Result("ok", version, version)


def slow_import(node: LocalNode) -> Result:
    seconds = float(node.torch()["seconds"])
    return warn(seconds > 30 and f"torch takes {seconds:.0f} s", f"torch takes {seconds:.1f} s")


def cuda_build(node: LocalNode) -> Result:
    facts = node.torch()
    gpus = node.paths("/proc/driver/nvidia/version")
    if not gpus:
        raise Skip("this machine has no NVIDIA driver")
    needs = facts["cuda"]
    if not needs:
        return Result("bad", f"torch {facts['torch']} has no CUDA", "none")
    match = re.search(r"CUDA Version: (\d+)\.(\d+)", node.run("nvidia-smi"))
    old = match is not None and int(match[1]) < int(str(needs).partition(".")[0])
    text = f"torch's CUDA is {needs}, the driver's {match[1] if match else 'unknown'}"
    blind = facts["gpus"] == 0 and "torch sees no GPU"
    return judge((old and text) or blind, text, str(needs))


def search_paths(node: LocalNode) -> Result:
    given = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")
    texts = [f"{name}={node.env[name]}" for name in given if node.env.get(name)]
    cuda = [part for part in node.env.get("LD_LIBRARY_PATH", "").split(":") if "cuda" in part]
    texts += [f"LD_LIBRARY_PATH has {cuda[0]}"] if cuda else []
    return warn("; ".join(texts), "no variable changes what is imported")


def leaked_variables(node: LocalNode) -> Result:
    of_rank = () if "SLURM_STEP_ID" in node.env else OF_RANKS  # a step has such variables itself
    names = [name for name in node.env if name.startswith("TORCHELASTIC_") or name in of_rank]
    return warn(listed(sorted(names)), "none of a rank that started this process")


def container(node: LocalNode) -> Result:
    marks = {"docker": ".dockerenv", "podman": "run/.containerenv", "apptainer": ".singularity.d"}
    names = [name for name, path in marks.items() if node.paths(path)]
    names += [name for name in ("enroot", "pyxis") if f"{name.upper()}_VERSION" in node.env]
    text = ", ".join(names) or "none"
    return Result("ok", text, text)


def slurm_version(_node: LocalNode) -> Result:
    version = cluster.version()
    if version is None:
        raise Skip("this machine has no Slurm")
    text = f"{version[0]}.{version[1]:02d}"
    return warn(version < (20, 11) and f"{text}: rollcall is tested from 20.11 on", text, text)
