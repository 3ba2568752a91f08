"""Python, its packages, torch, and the code."""

import json
import os
import re
import sys
import zlib
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rollcall.cli.installation import ROOT
from rollcall.launch.doctor.check import LocalNode, Result, Skip, judge

MOST_FILES, MOST_FOLDERS = 3000, 1000
PACKAGES = """
import json
from importlib import metadata
print(json.dumps({d.metadata["Name"] or "": d.version for d in metadata.distributions()}))
"""


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
