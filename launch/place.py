"""Can a run keep its files there? Looked at from here, before a node finds out that it cannot."""

from __future__ import annotations

import os
import re
from pathlib import Path

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def problem(root: Path) -> str | None:
    """Why no run can be made under this directory; None if one can."""
    if match := re.search("%[jtaA]", str(root)):
        return f"{root}: {match[0]} in a path stands for a number of the job: take another place"
    parent = root if root.is_dir() else root.parent
    if parent.is_dir() and not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent}: you may not write there"
    if parent.is_dir():
        return None
    there = next(place for place in parent.parents if place.exists())
    if not there.is_dir():
        return f"{there} is a file, so no run can be made in {root}"
    return f"there is no {parent}, only {there}: correct --root, or `mkdir -p {parent}`"


def is_node_local(root: Path) -> bool:
    """Whether other hosts surely do not see this directory: it is in memory, or below /tmp."""
    path = root.resolve()
    mount, kind = Path("/"), ""
    with Path("/proc/self/mountinfo").open() as lines:
        for line in lines:
            place, _, rest = line.partition(" - ")
            # Blanks in a name are written as \040.
            point = Path(place.split()[4].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and len(point.parts) >= len(mount.parts):
                mount, kind = point, rest.split()[0]
    if kind in IN_MEMORY:
        return True
    # A file system mounted further down, below /tmp, may well be a shared one.
    return any(
        path.is_relative_to(place) and Path(place).is_relative_to(mount) for place in NODE_LOCAL
    )
