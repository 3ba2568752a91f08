"""Copy the code of a run, as submitted, to the run directory.

In a git checkout and its submodules, tracked and untracked files are copied, ignored files are not.
Outside git, the parts of rollcall in PACKAGED are copied, or all files of a user's directory that
are not hidden. Runs share identical source files (see snapshot_store.py). They do not share other
files of the user, because a script may overwrite a checkpoint or a table beside it.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from stat import S_IRUSR, S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, NamedTuple

from rollcall.installation import ROOT
from rollcall.records.code import CodeRecord
from rollcall.records.files import write_atomic
from rollcall.records.job import JobRecord
from rollcall.refusal import RefusedError

if TYPE_CHECKING:
    from rollcall.launch.submission.snapshot_store import Store

Names = Sequence[str]
ALL = ("",)
SOURCES = (".py", ".pyi", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh")
"""Suffixes of the user's files that runs share. Of rollcall, they share ALL files."""
MOST_FILES, MOST_BYTES = 10_000, 500_000_000
"""Limits of the files to copy that are not in git."""
DIFF = ["diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short"]
DIFF += ["--src-prefix=a/", "--dst-prefix=b/"]  # whatever the user has set, for git apply
RUN = f"/{JobRecord.FILE}"
"""How the name of a file ends that only the directory of a submitted run has."""


class Snapshot(NamedTuple):
    """The files to copy, relative to the root.

    Attributes:
        size: size of all files, in bytes.
        commit: commit of the checkout; None outside git or before the first commit.
        is_modified: whether the checkout has uncommitted changes.
        in_git: whether the files come from git's list.
        shared: suffixes of the files that runs share.
        diff: uncommitted changes, as git shows them.
        links: files and directories that the copy has as links to the originals.
        record: record of another run's copy, if this one is copied from it; else None.
    """

    root: Path
    files: tuple[str, ...]
    size: int
    commit: str | None
    is_modified: bool
    in_git: bool
    shared: tuple[str, ...]
    diff: bytes = b""
    record: Path | None = None
    links: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line for people."""
        if self.record is not None:
            source = f"as first submitted, commit {self.commit}"
        elif not self.in_git:
            source = "not a git checkout"
        else:
            source = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
            source += ", with changes" if self.is_modified else ", unchanged"
        return f"{len(self.files)} files, {self.size / 1e6:.1f} MB, from {self.root} ({source})"


def plan(
    root: Path, leave_out: Sequence[Path], only: Names = (), links: Names = (), modules: Names = ()
) -> Snapshot:
    """List the code under `root`; write nothing.

    Args:
        leave_out: directories without code, such as the run directories.
        only: for rollcall itself, the files and directories to copy outside git.
        links: what the copy has as links, relative to the root.
        modules: imported modules, by their real paths; also outside the root.

    Raises:
        RefusedError: git fails, or there are too many or too large files that are not in git.
    """
    in_git = (root / ".git").exists()
    leave_out = [*leave_out, *(root / name for name in links)]
    if in_git:
        inside = [os.path.relpath(path, root.resolve()) for path in modules]
        inside = [name for name in inside if not name.startswith(".")]
        names, untracked = _in_git(root, (), inside)
        status = os.fsdecode(git(root, "status", "--porcelain=v2", "--branch")).splitlines()
        oid = next(line.split()[2] for line in status if line.startswith("# branch.oid"))
        commit = None if oid == "(initial)" else oid
        is_modified = any(not line.startswith("#") for line in status)
        differs = commit and any(not line.startswith(("#", "?")) for line in status)
    else:
        names, commit, is_modified = list(_listed(root, leave_out, only)), None, False
        untracked, differs = set(names), False
    diff = git(root, *DIFF, "HEAD") if differs else b""
    apart = tuple(f"{os.path.relpath(place, root)}/" for place in leave_out)
    apart += tuple(name.removesuffix(RUN[1:]) for name in untracked if name.endswith(RUN))
    names = [name for name in names if not f"{name}/".startswith(apart)]
    files, out = _found(root, names)
    own = os.geteuid()
    for name, entry in files.items():
        is_readable = entry.st_uid == own and entry.st_mode & S_IRUSR
        if not is_readable and S_ISREG(entry.st_mode) and not os.access(root / name, os.R_OK):
            raise RefusedError(f"{root / name}: you have no permission to read it")
    if not (only and in_git):
        _check_size(root, {name: files[name].st_size for name in untracked & files.keys()}, in_git)
    shared = ALL if only else SOURCES
    facts = (_size(files), commit, is_modified, in_git, shared, diff)
    return Snapshot(root, (*files, *links), *facts, links=(*links, *out))


def _in_git(root: Path, names: Names, modules: Names) -> tuple[list[str], set[str]]:
    """List the files of a checkout and its submodules, and which of them git does not track."""
    new = _ls(root, "-o", "--", *names)
    staged = [entry.partition("\t")[::2] for entry in _ls(root, "-s", "--", *names)]
    files = [*new, *(name for _, name in staged)]
    if modules and files:  # compiled extensions, version files
        built = [name for name in _ls(root, "-oi", "--", *modules) if "site-packages/" not in name]
        files += [name for name in built if name.endswith((".py", ".so"))]
    folders = [f"{name}/" for mode, name in staged if mode.startswith("160000")]
    for folder in (*folders, *(name for name in files if name.endswith("/"))):
        own = [os.path.relpath(name, folder) for name in modules if f"{name}/".startswith(folder)]
        own += ["." for name in modules if folder.startswith(f"{name}/")]
        if (own or folder in folders) and (root / folder / ".git").exists():
            inside, inside_new = _in_git(root / folder, (), own)
            files += [f"{folder}{name}" for name in inside]
            new += [f"{folder}{name}" for name in inside_new]
    return files, set(new)


def _ls(root: Path, *words: str) -> list[str]:
    listed = git(root, "ls-files", "--exclude-standard", "-z", *words).split(b"\0")
    return [os.fsdecode(name) for name in listed[:-1]]


def _found(root: Path, names: Iterable[str]) -> tuple[dict[str, os.stat_result], list[str]]:
    """Return what lstat says of each file, and the relative links to what is not copied."""
    files: dict[str, os.stat_result] = {}
    for name in names:  # git also lists deleted files and nested repositories
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entry = os.lstat(f"{root}/{name}")
            if S_ISREG(entry.st_mode) or S_ISLNK(entry.st_mode):  # to read a pipe would hang
                files[name] = entry
    links = {name for name, entry in files.items() if S_ISLNK(entry.st_mode)}
    if not links:
        return files, []
    above = {name: {*map(str, Path(name).parents)} for name in files}
    # Git also lists the files of a directory that became a link.
    files = {name: entry for name, entry in files.items() if not links & above[name]}
    there = {*files, *chain.from_iterable(above[name] for name in files)}
    targets = {name: (root / name).readlink() for name in files if name in links}
    ends = {name: os.path.normpath(Path(name).parent / to) for name, to in targets.items()}
    return files, [name for name, end in ends.items() if end[0] != "/" and end not in there]


def _size(files: Mapping[str, os.stat_result]) -> int:
    return sum(entry.st_size for entry in files.values())


def _check_size(root: Path, sizes: dict[str, int], in_git: bool, can_link: bool = True) -> None:
    """Refuse to copy too much that is not in git: it is data, and every run would get a copy."""
    if len(sizes) <= MOST_FILES and sum(sizes.values()) <= MOST_BYTES:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    folder = os.path.dirname(largest) or largest  # noqa: PTH120
    data = os.path.relpath(root / (largest if sizes[largest] > MOST_BYTES else folder))
    what = "untracked files" if in_git else "files outside git"
    cure = f"list it in {root}/.gitignore" + ("" if in_git else f" after `git init {root}`")
    cure = f"link it (--link {data}), or {cure}" if can_link else cure
    raise RefusedError(
        f"{root} is too large to copy for every run: it has more than {MOST_FILES} {what}, or "
        f"{MOST_BYTES // 10**6} MB of them; the largest is {largest}, "
        f"{sizes[largest] // 10**6} MB. To leave data out, {cure}"
    )


def ignored(root: Path, names: Names) -> list[str]:
    """Return which of these files and directories git ignores, or what in them.

    A directory that is ignored as a whole counts once.

    Raises:
        RefusedError: git fails, or this is no checkout.
    """
    return _ls(root, "-oi", "--directory", "--", *names)


def plan_modules(root: Path, names: Names) -> Snapshot:
    """List the files of some modules in a directory, which may be part of a git checkout.

    Raises:
        RefusedError: they have too many or too large files.
    """
    listed: list[str] = []
    untracked: set[str] = set()
    commit, diff = None, b""
    with contextlib.suppress(RefusedError, ValueError):  # outside git, or it is another user's
        listed, untracked = _in_git(root, names, names)
        commit = git(root, "rev-parse", "HEAD").decode().strip()
        diff = git(root, *DIFF, "--relative", "HEAD", "--", *names)
    in_git = bool(listed)
    files, links = _found(root, listed or _listed(root, (), names))
    counted = untracked & files.keys() if in_git else files
    _check_size(root, {name: files[name].st_size for name in counted}, in_git, can_link=False)
    facts = (_size(files), commit, bool(diff), in_git, SOURCES, diff)
    return Snapshot(root, tuple(files), *facts, links=tuple(links))


def take(snapshot: Snapshot, target: Path, record: Path, kept: Path) -> None:
    """Copy the files, and record their source and the uncommitted changes.

    Args:
        target: directory of the copy, which appears only when it is complete; an existing one
            is renamed to `code-0`, `code-1`, ...
        record: file name without suffix for the record, `.json` and `.diff`.
        kept: directory of the store, on the same file system as `target`.

    Raises:
        OSError: the run directory cannot be written.
        RefusedError: git fails, or files of the copy that this one is copied from have changed.
    """
    # Here: a dry run does not need them.
    import shutil

    from rollcall.launch.submission.snapshot_store import Store

    beside = target.with_name(f".{target.name}.{os.getpid()}")
    store = Store(kept, None if snapshot.record else snapshot.root)
    try:
        digests = _copy(snapshot, beside, store)
        store.remember()
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        store.tidy()
    if target.exists():
        _put_aside(target, record)
    if snapshot.record is not None:
        for kind in (".json", ".diff"):
            if (written := snapshot.record.with_suffix(kind)).exists():
                shutil.copyfile(written, record.with_suffix(kind))
        beside.rename(target)
        return
    if snapshot.commit:
        write_atomic(record.with_suffix(".diff"), snapshot.diff)
    place, facts = str(snapshot.root), (snapshot.commit, snapshot.is_modified)
    source = CodeRecord(place, snapshot.size, list(snapshot.shared), digests, *facts)
    source.write(record.with_suffix(".json"))
    beside.rename(target)


def _copy(snapshot: Snapshot, target: Path, store: "Store") -> dict[str, str | None]:
    """Copy the files; return the SHA-256 of each, None for links."""
    import shutil

    recorded = CodeRecord.read(snapshot.record.with_suffix(".json")) if snapshot.record else None
    expected = recorded.files if recorded else {}
    digests: dict[str, str | None] = {}
    target.mkdir(parents=True)
    folders: set[str] = set()
    for name in snapshot.files:
        source, copy = f"{snapshot.root}/{name}", f"{target}/{name}"
        if (folder := copy.rpartition("/")[0]) not in folders:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 (as below, text is quicker)
            folders.add(folder)
        digests[name] = None
        found = os.lstat(source)
        if name in snapshot.links:
            os.symlink(source, copy)  # noqa: PTH211
        elif S_ISLNK(found.st_mode):
            shutil.copy2(source, copy, follow_symlinks=False)
        elif S_ISDIR(found.st_mode):  # a link that a copy of the run has followed
            shutil.copytree(source, copy, symlinks=True)
        else:
            is_shared = name.endswith(snapshot.shared)
            digests[name] = store.place(name, found, source, copy, is_shared)
        if expected and expected[name] != digests[name]:
            raise RefusedError(
                f"{source} is not the submitted file any more: the run has changed it"
            )
    return digests


def _put_aside(target: Path, record: Path) -> None:
    before = len(list(target.parent.glob(f"{target.name}-*")))  # some may have been removed
    number = next(it for it in count(before) if not Path(f"{target}-{it}").exists())
    for path in (target, record.with_suffix(".json"), record.with_suffix(".diff")):
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def recorded(copy: Path, record: Path) -> Snapshot:
    """Return the files of a copy made by `take`, from which to make another copy.

    Raises:
        KeyError: the copy has no record that can be read.
    """
    source = CodeRecord.read(record.with_suffix(".json"))
    if source is None:
        raise KeyError(str(record.with_suffix(".json")))
    return Snapshot(
        root=copy,
        shared=tuple(source.shared),
        files=tuple(source.files),
        size=source.bytes,
        commit=source.commit,
        is_modified=source.modified,
        in_git=False,
        record=record,
    )


def _listed(root: Path, leave_out: Sequence[Path], only: Names) -> Iterator[str]:
    """Yield the files under `root`, at most one more than allowed."""
    found = 0
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        if here == root and only:
            folders[:] = [name for name in folders if name in only]
            files = [name for name in files if name in only]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and here / name not in leave_out
            if not (here / f"{name}{RUN}").is_file()
        )
        links = [name for name in folders if (here / name).is_symlink()]
        for name in [*links, *files]:
            yield str((here / name).relative_to(root))
            found += 1
            if found > MOST_FILES:
                return


def git(root: Path, *words: str) -> bytes:
    """Return the output of git in a directory; raise RefusedError if it fails."""
    # Whoever runs rollcall trusts its checkout, even if an administrator owns it.
    trusted = ["-c", f"safe.directory={root}"] if root == ROOT else []
    command = ["git", *trusted, "-C", str(root), *words]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise RefusedError(f"{root} is a git checkout, but git is not on PATH") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise RefusedError(f"git {words[0]} fails in {root}: {said}") from None
