"""Which code does a run run? A copy of the checkout as it was submitted, in the run directory.

Inside git: tracked, modified and untracked files, and not the ignored ones. Outside: the
directories in PACKAGED for rollcall itself, and all but hidden files of a user's own directory.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from train.run import write_atomic

PACKAGED = ("env", "launch", "slurm", "train", "pyproject.toml")
"""What is copied of a rollcall that is no git checkout."""
MOST_FILES, MOST_BYTES = 10_000, 500_000_000
"""What is copied at most of a directory that no .gitignore describes."""


class SnapshotError(Exception):
    """The code cannot be listed or copied; the message says why."""


class Snapshot(NamedTuple):
    """The files that would be copied, relative to the root.

    Attributes:
        size: bytes of all files.
        commit: of the checkout; None outside git or before the first commit.
        is_modified: whether there are changes that are in no commit.
        in_git: whether git told the files.
        record: of the copy that this one is copied from; None if it comes from a checkout.
    """

    root: Path
    files: tuple[str, ...]
    size: int
    commit: str | None
    is_modified: bool
    in_git: bool
    record: Path | None = None

    def describe(self) -> str:
        """One line for a person."""
        if self.record is not None:
            source = f"as it was submitted, commit {self.commit}"
        elif not self.in_git:
            source = "not a git checkout"
        else:
            source = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
            source += ", with changes" if self.is_modified else ", unchanged"
        return f"{len(self.files)} files, {self.size / 1e6:.1f} MB, from {self.root} ({source})"


def plan(root: Path, leave_out: Path, only: Sequence[str] = ()) -> Snapshot:
    """List the code under `root`; nothing is written.

    Args:
        root: the checkout.
        leave_out: a directory that is not code: that of the runs.
        only: the files and directories that count where there is no git (default: all).

    Raises:
        SnapshotError: git fails, or there is no git and too much to copy.
    """
    in_git = (root / ".git").exists()
    if in_git:
        names = _git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0")[:-1]
        status = _git(root, "status", "--porcelain=v2", "--branch").splitlines()
        oid = next(line.split()[2] for line in status if line.startswith("# branch.oid"))
        commit = None if oid == "(initial)" else oid
        is_modified = any(not line.startswith("#") for line in status)
    else:
        names, commit, is_modified = list(_listed(root, leave_out, only)), None, False
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
    if not in_git and (len(files) > MOST_FILES or size > MOST_BYTES):
        raise SnapshotError(
            f"{root} is no git checkout and holds more than {MOST_FILES} files or "
            f"{MOST_BYTES // 10**6} MB, too much to copy for every run: `git init` there, and name "
            "in .gitignore what is no code"
        )
    return Snapshot(root, tuple(files), size, commit, is_modified, in_git)


def take(snapshot: Snapshot, target: Path, record: Path) -> None:
    """Copy the files, and note beside `record` where they come from and what is in no commit.

    Args:
        snapshot: what to copy.
        target: becomes the copy, whole or not at all.
        record: a file name without suffix: `.json` and `.diff` are written.

    Raises:
        OSError: the run directory cannot be written.
        SnapshotError: git fails.
    """
    import shutil  # here, because a dry run does without

    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    for name in snapshot.files:
        copy = beside / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        source = snapshot.root / name
        if source.is_dir() and not source.is_symlink():
            continue  # a submodule, which git lists as one name
        shutil.copy2(source, copy, follow_symlinks=False)
    if snapshot.record is not None:
        for kind in (".json", ".diff"):
            if (written := snapshot.record.with_suffix(kind)).exists():
                shutil.copyfile(written, record.with_suffix(kind))
        beside.rename(target)
        return
    if snapshot.commit:
        write_atomic(record.with_suffix(".diff"), _git(snapshot.root, "diff", "--binary", "HEAD"))
    source_of = {
        "root": str(snapshot.root),
        "commit": snapshot.commit,
        "modified": snapshot.is_modified,
        "files": len(snapshot.files),
        "bytes": snapshot.size,
        "paths": snapshot.files,
    }
    write_atomic(record.with_suffix(".json"), json.dumps(source_of, indent=2) + "\n")
    beside.rename(target)


def recorded(copy: Path, record: Path) -> Snapshot:
    """The copy that `take` has made, as what a further one can be made of.

    Raises:
        FileNotFoundError, KeyError: there is no such copy.
    """
    source = json.loads(record.with_suffix(".json").read_text())
    files, commit, is_modified = source["paths"], source["commit"], source["modified"]
    return Snapshot(copy, tuple(files), source["bytes"], commit, is_modified, False, record)


def _listed(root: Path, leave_out: Path, only: Sequence[str]) -> Iterator[str]:
    """The files under `root`, one more than is allowed at most."""
    found = 0
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        if here == root and only:
            folders[:] = [name for name in folders if name in only]
            files = [name for name in files if name in only]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and here / name != leave_out
        )
        for name in files:
            yield str((here / name).relative_to(root))
            found += 1
            if found > MOST_FILES:
                return


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
