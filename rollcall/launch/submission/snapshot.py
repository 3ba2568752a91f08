"""Copy the code of a run, as submitted, to the run directory.

In a git checkout and its submodules, tracked and untracked files are copied, ignored files are not.
Outside git, the parts of rollcall in PACKAGED are copied, or all files of a user's directory that
are not hidden. A script does not get RESULTS of earlier runs. Runs share identical source files
(see snapshot_store.py). They do not share other files of the user, because a script may overwrite a
table beside it.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from stat import S_IRUSR, S_ISLNK, S_ISREG
from typing import NamedTuple

from rollcall.cli.installation import ROOT
from rollcall.launch.submission.snapshot_store import SourceStore
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import listed
from rollcall.records.code import CodeRecord
from rollcall.records.job import JobRecord
from rollcall.system.files import is_there, open_regular, write_atomic

Names = Sequence[str]
ALL = ("",)
SOURCES = (".py", ".pyi", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh")
"""Suffixes of the user's files that runs share. Of rollcall, they share ALL files."""
MOST_FILES, MOST_BYTES = 10_000, 500_000_000
"""Limits of the files to copy that are not in git."""
RESULTS = re.compile(
    r"(^|/)((damaged-)?step-\d{8,}|\.saving-[^/]*|checkpoint-\d+|global_step\d+|lightning_logs|wandb"
    r"|mlruns)/|(^|/)events\.out\.tfevents\.|^(?!(.*/)?data[^/]*/).*\.(pt|pth|ckpt)$"
)
"""Matches names of files that trainings write: with them, a new run would continue an old one."""
DIFF = ["diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short"]
DIFF += ["--src-prefix=a/", "--dst-prefix=b/"]  # whatever the user has set, for git apply
RUN = f"/{JobRecord.FILE}"
"""How the name of a file ends that only the directory of a submitted run has."""


class Snapshot(NamedTuple):
    """The files to copy, relative to the root."""

    root: Path
    files: tuple[str, ...]
    size: int  # of all files, in bytes
    commit: str | None  # of the checkout; None outside git or before the first commit
    is_modified: bool  # whether the checkout has uncommitted changes
    in_git: bool  # whether the files come from git's list
    shared: tuple[str, ...]  # suffixes of the files that runs share
    diff: bytes = b""  # uncommitted changes, as git shows them
    links: tuple[str, ...] = ()  # what the copy has as links to the originals
    results: tuple[str, ...] = ()  # files of earlier runs that are not copied

    def describe(self) -> str:
        """Return one line for people."""
        if not self.in_git:
            source = "not a git checkout"
        else:
            source = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
            source += ", with changes" if self.is_modified else ", unchanged"
        return f"{len(self.files)} files, {self.size / 1e6:.1f} MB, from {self.root} ({source})"

    def describe_results(self) -> str:
        """Return one line about what stays behind."""
        names = listed(list(dict.fromkeys(re.sub(r"/.*", "/", name) for name in self.results)))
        return f"results of earlier runs stay behind: {names}; if one is needed, add --link PATH"


def plan(
    root: Path,
    leave_out: Sequence[Path],
    only: Names = (),
    links: Names = (),
    modules: Names = (),
    inputs: Iterable[str] | None = None,
) -> Snapshot:
    """List the code under `root`; raise RefusedError if git fails, or it is too large.

    Args:
        leave_out: directories without code, such as the run directories.
        only: for rollcall itself, the files and directories to copy outside git.
        links: what the copy has as links, relative to the root.
        modules: imported modules, by their real paths; also outside the root.
        inputs: without other RESULTS that git does not track; None copies all of them.
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
    try:
        diff = git(root, *DIFF, "HEAD") if differs else b""
    except RefusedError as error:  # a partial clone, or objects are missing
        diff = f"# The changes are unknown: {error}\n".encode()
    apart = tuple(f"{os.path.relpath(place, root)}/" for place in leave_out)
    apart += tuple(name.removesuffix(RUN[1:]) for name in untracked if name.endswith(RUN))
    names = [name for name in names if not f"{name}/".startswith(apart)]
    results = [] if inputs is None else untracked.difference(inputs).intersection(names)
    left = {name for name in results if RESULTS.search(name)}
    files, out = _found(root, [name for name in names if name not in left])
    own = os.geteuid()
    for name, entry in files.items():
        is_readable = entry.st_uid == own and entry.st_mode & S_IRUSR
        if not is_readable and S_ISREG(entry.st_mode) and not os.access(root / name, os.R_OK):
            raise RefusedError(f"{root / name}: you have no permission to read it")
    if not (only and in_git):
        _check_size(root, {name: files[name].st_size for name in untracked & files.keys()}, in_git)
    shared = ALL if only else SOURCES
    size = sum(entry.st_size for entry in files.values())
    facts = (size, commit, is_modified, in_git, shared, diff)
    copied, linked = (*files, *links), (*links, *out)
    return Snapshot(root, copied, *facts, links=linked, results=tuple(sorted(left)))


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


def _check_size(root: Path, sizes: Mapping[str, int], in_git: bool, can_link: bool = True) -> None:
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


def ignored(root: Path) -> list[str]:
    """Return the files and directories that git ignores; a whole directory counts once."""
    return _ls(root, "-oi", "--directory", "--", ".")


def plan_modules(root: Path, names: Names) -> Snapshot:
    """List the files of some modules in a directory, which may be part of a git checkout."""
    listed: list[str] = []
    untracked: set[str] = set()
    commit, diff = None, b""
    with contextlib.suppress(RefusedError, ValueError):  # outside git, or it is another user's
        listed, untracked = _in_git(root, names, names)
        commit = git(root, "rev-parse", "HEAD").decode().strip()
        diff = git(root, *DIFF, "--relative", "HEAD", "--", *names)
    in_git = bool(listed)
    files, links = _found(root, listed or _listed(root, (), names))
    sizes = {name: entry.st_size for name, entry in files.items()}
    counted = {name: sizes[name] for name in untracked & files.keys()} if in_git else sizes
    _check_size(root, counted, in_git, can_link=False)
    facts = (sum(sizes.values()), commit, bool(diff), in_git, SOURCES, diff)
    return Snapshot(root, tuple(files), *facts, links=tuple(links))


def take(snapshot: Snapshot, target: Path, record: Path, kept: Path) -> None:
    """Copy the files, and record their source and the uncommitted changes.

    Args:
        target: directory of the copy, which appears only when it is complete; an existing one
            is renamed to `code-0`, `code-1`, ..., and gives what a script wrote to the new one
        record: file name without suffix for the record, `.json` and `.diff`.
        kept: directory of the store, on the same file system as `target`.

    Raises:
        OSError: the run directory cannot be written.
    """
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    store = SourceStore(kept)
    try:
        digests = _copy(snapshot, beside, store)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        store.tidy()
    known = CodeRecord.read(record.with_suffix(".json"))
    if target.exists():
        aside = _put_aside(target, record)
        if known is not None and snapshot.shared != ALL:
            _carry_over(aside, beside, known.files)
    if snapshot.commit:
        write_atomic(record.with_suffix(".diff"), snapshot.diff)
    place, facts = str(snapshot.root), (snapshot.commit, snapshot.is_modified)
    source = CodeRecord(place, list(snapshot.shared), digests, *facts)
    source.write(record.with_suffix(".json"))
    beside.rename(target)


def _copy(snapshot: Snapshot, target: Path, store: SourceStore) -> dict[str, str | None]:
    digests: dict[str, str | None] = {}
    target.mkdir(parents=True)
    folders: set[str] = set()
    for name in snapshot.files:
        source, copy = f"{snapshot.root}/{name}", f"{target}/{name}"
        if (folder := copy.rpartition("/")[0]) not in folders:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 (as below, text is quicker)
            folders.add(folder)
        digests[name] = None
        if name in snapshot.links:
            os.symlink(source, copy)  # noqa: PTH211
        elif os.path.islink(source):  # noqa: PTH114
            shutil.copy2(source, copy, follow_symlinks=False)
        else:
            digests[name] = store.place(source, copy, name.endswith(snapshot.shared))
    return digests


def _put_aside(target: Path, record: Path) -> Path:
    before = len(list(target.parent.glob(f"{target.name}-*")))  # some may have been removed
    number = next(it for it in count(before) if not Path(f"{target}-{it}").exists())
    for path in (target, record.with_suffix(".json"), record.with_suffix(".diff")):
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return Path(f"{target}-{number}")


def _carry_over(old: Path, new: Path, copied: Iterable[str]) -> None:
    """Move what a script wrote beside its code, such as its checkpoints, to the new copy."""
    known = {*copied, *(str(parent) for name in copied for parent in Path(name).parents)}
    for folder, folders, files in os.walk(old):
        inside = Path(folder).relative_to(old)
        for name in (*folders, *files):
            path = inside / name
            if str(path) not in known and name != "__pycache__" and not (new / path).exists():
                (new / inside).mkdir(parents=True, exist_ok=True)
                (old / path).rename(new / path)
        folders[:] = [name for name in folders if (old / inside / name).exists()]


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
            if not (here / f"{name}{RUN}").is_file() and not ignores_itself(here / name)
        )
        links = [name for name in folders if (here / name).is_symlink()]
        for name in [*links, *files]:
            yield str((here / name).relative_to(root))
            found += 1
            if found > MOST_FILES:
                return


def ignores_itself(folder: Path) -> bool:
    """Return True for a directory of runs, an environment or a cache: git would ignore it."""
    with contextlib.suppress(OSError), open_regular(folder / ".gitignore") as file:
        return b"*" in file.read(1000).split()
    return is_there(folder / "pyvenv.cfg")


def git(root: Path, *words: str, env: Mapping[str, str] | None = None, names: Names = ()) -> bytes:
    """Return the output of git in a directory, which reads these names, if it succeeds."""
    # Whoever runs rollcall trusts its checkout, even if an administrator owns it.
    trusted = ["-c", f"safe.directory={root}"] if root == ROOT else []
    # No hooks of the user's.
    command = ["git", *trusted, "-c", "core.hooksPath=/dev/null", "-C", str(root), *words]
    listed = os.fsencode("\0".join(names))
    try:
        return subprocess.run(
            command, env=env, input=listed, capture_output=True, check=True
        ).stdout
    except FileNotFoundError:
        raise RefusedError(f"git is not on PATH, and {root} is copied with it") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise RefusedError(f"git {words[0]} fails in {root}: {said}") from None
