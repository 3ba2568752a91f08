"""Which code does a run run? A copy of the checkout as it was submitted, in the run directory.

Inside git: tracked, modified and untracked files, and not the ignored ones. Outside: the
directories in PACKAGED.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from train.run import RunDir, write_atomic

PACKAGED = ("env", "launch", "slurm", "train", "pyproject.toml")
"""What is copied from a directory that is no git checkout."""


class SnapshotError(Exception):
    """The code cannot be listed or copied; the message says why."""


class Snapshot(NamedTuple):
    """The files that would be copied, relative to the root.

    Attributes:
        size: bytes of all files.
        commit: of the checkout; None outside git or before the first commit.
        is_modified: whether there are changes that are in no commit.
        in_git: whether git told the files.
    """

    root: Path
    files: tuple[str, ...]
    size: int
    commit: str | None
    is_modified: bool
    in_git: bool

    def describe(self) -> str:
        """One line for a person."""
        if not self.in_git:
            source = f"not a git checkout: {', '.join(PACKAGED)}"
        else:
            source = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
            source += ", with changes" if self.is_modified else ", unchanged"
        return f"{len(self.files)} files, {self.size / 1e6:.1f} MB, from {self.root} ({source})"


def plan(root: Path, leave_out: Path) -> Snapshot:
    """List the code under `root`; nothing is written.

    Args:
        root: the checkout.
        leave_out: a directory that is not code: that of the runs.

    Raises:
        SnapshotError: git fails.
    """
    in_git = (root / ".git").exists()
    if in_git:
        names = _git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0")[:-1]
        status = _git(root, "status", "--porcelain=v2", "--branch").splitlines()
        oid = next(line.split()[2] for line in status if line.startswith("# branch.oid"))
        commit = None if oid == "(initial)" else oid
        is_modified = any(not line.startswith("#") for line in status)
    else:
        names, commit, is_modified = list(_packaged(root)), None, False
    files: list[str] = []
    size = 0
    apart = f"{os.path.relpath(leave_out, root)}/"
    for name in names:
        try:
            entry = (root / name).lstat()
        except FileNotFoundError:
            continue  # tracked, but deleted here
        if not name.startswith(apart) and not name.endswith("/"):  # "/": a repository inside
            files.append(name)
            size += entry.st_size
    return Snapshot(root, tuple(files), size, commit, is_modified, in_git)


def take(snapshot: Snapshot, run: RunDir) -> None:
    """Copy the files into the run, with the commit and the changes under job/.

    Raises:
        OSError: the run directory cannot be written.
        SnapshotError: git fails.
    """
    import shutil  # here, because a dry run does without

    beside = run.path / f".code.{os.getpid()}"
    for name in snapshot.files:
        target = beside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = snapshot.root / name
        if source.is_dir() and not source.is_symlink():
            continue  # a submodule, which git lists as one name
        shutil.copy2(source, target, follow_symlinks=False)
    run.job.mkdir(exist_ok=True)
    if snapshot.commit:
        changes = _git(snapshot.root, "diff", "--binary", "HEAD")
        write_atomic(run.job / "source.diff", changes)
    source_of = {
        "root": str(snapshot.root),
        "commit": snapshot.commit,
        "modified": snapshot.is_modified,
        "files": len(snapshot.files),
        "bytes": snapshot.size,
    }
    write_atomic(run.job / "source.json", json.dumps(source_of, indent=2) + "\n")
    beside.rename(run.code)


def _packaged(root: Path) -> list[str]:
    names: list[str] = []
    for top in PACKAGED:
        paths = [root / top] if (root / top).is_file() else sorted((root / top).rglob("*"))
        names += [
            str(path.relative_to(root))
            for path in paths
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return names


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    try:
        # surrogateescape: file names are bytes, not always text.
        return subprocess.run(
            command, capture_output=True, check=True, encoding="utf-8", errors="surrogateescape"
        ).stdout
    except FileNotFoundError:
        raise SnapshotError(f"{root} is a git checkout, but there is no git on PATH") from None
    except subprocess.CalledProcessError as error:
        raise SnapshotError(f"git {words[0]} fails in {root}: {error.stderr.strip()}") from None
