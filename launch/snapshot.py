"""Which code does a run run? A copy of the checkout as it was submitted, in the run directory.

Inside git: tracked, modified and untracked files, and not the ignored ones. Outside: the
directories in PACKAGED for rollcall itself, and all but hidden files of a user's own directory.
Runs share what is equal (launch.store) and is no data: a script of the user's own may write over
the checkpoint or table that lay beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.run import write_atomic

ALL = ("",)
SOURCES = (".py", ".pyi", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh")
"""How the files end that runs share: all of rollcall's own, and what users' programs consist of."""
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
        shared: how the files end that runs share.
        record: of the copy that this one is copied from; None if it comes from a checkout.
    """

    root: Path
    files: tuple[str, ...]
    size: int
    commit: str | None
    is_modified: bool
    in_git: bool
    shared: tuple[str, ...]
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
        only: for rollcall itself, the files and directories that count where there is no git.

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
    shared = ALL if only else SOURCES
    return Snapshot(root, tuple(files), size, commit, is_modified, in_git, shared)


def take(snapshot: Snapshot, target: Path, record: Path, kept: Path) -> None:
    """Copy the files, and note beside `record` where they come from and what is in no commit.

    Args:
        snapshot: what to copy.
        target: becomes the copy, whole or not at all; what is there goes to `code-0`, ...
        record: a file name without suffix: `.json` and `.diff` are written, likewise.
        kept: the directory of the store, on the same file system as `target`.

    Raises:
        OSError: the run directory cannot be written.
        SnapshotError: git fails, or the copy that this one is copied from is no longer whole.
    """
    import shutil  # here, because a dry run does without

    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        digests = _copy(snapshot, beside, kept)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if target.exists():
        _put_aside(target, record)
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
        "bytes": snapshot.size,
        "shared": snapshot.shared,
        "files": digests,
    }
    write_atomic(record.with_suffix(".json"), json.dumps(source_of, indent=2) + "\n")
    beside.rename(target)


def _copy(snapshot: Snapshot, target: Path, kept: Path) -> dict[str, str | None]:
    """Copy the files; return the SHA-256 of each, None for links and the like."""
    import shutil

    from launch.store import Store, digest_of

    store = Store(kept)
    expected = _recorded(snapshot.record)["files"] if snapshot.record else {}
    digests: dict[str, str | None] = {}
    target.mkdir(parents=True)
    for name in snapshot.files:
        source, copy = snapshot.root / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        digests[name] = None
        if source.is_symlink():
            shutil.copy2(source, copy, follow_symlinks=False)
        elif source.is_dir():
            pass  # a submodule, which git lists as one name
        elif name.endswith(snapshot.shared):
            digests[name] = store.place(source, copy)
        else:
            shutil.copy2(source, copy)
            digests[name] = digest_of(copy)
        if expected and expected[name] != digests[name]:
            raise SnapshotError(f"{source} is no longer what was submitted: the run wrote over it")
    store.tidy()
    return digests


def _put_aside(target: Path, record: Path) -> None:
    """Keep an older copy and its record under a number."""
    number = len(list(target.parent.glob(f"{target.name}-*")))
    for path in (target, record.with_suffix(".json"), record.with_suffix(".diff")):
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def recorded(copy: Path, record: Path) -> Snapshot:
    """The copy that `take` has made, as what a further one can be made of.

    Raises:
        FileNotFoundError, KeyError: there is no such copy.
    """
    source = _recorded(record)
    return Snapshot(
        root=copy,
        shared=tuple(source["shared"]),
        files=tuple(source["files"]),
        size=source["bytes"],
        commit=source["commit"],
        is_modified=source["modified"],
        in_git=False,
        record=record,
    )


def _recorded(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.with_suffix(".json").read_text())
    return found


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
