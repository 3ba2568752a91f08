"""Where does a run keep things? The run directory: plain files, each with one writer. No torch.

A file is either whole or absent: it is written beside its place, brought to disk and renamed.
Line files (metrics.jsonl, events.jsonl) only grow; a line cut by a crash is left out on reading.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_IWOTH
from typing import Any, Literal

State = Literal["done", "requeue", "failed", "stopped"]
MOST_WAITING = 10_000
"""Lines that wait for a disk that takes none; then the oldest are lost."""


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended: what a launcher or a person must do next follows from `state`.

    `done`: nothing is left to do. `requeue`: asked to stop by the scheduler, start it again.
    `stopped`: a person asked it to stop. `failed`: see `reason`.
    """

    state: State
    step: int
    reason: str


class FencedError(OSError):
    """Another attempt of the run has begun: this one may write no checkpoint and no verdict."""


class RunDir:
    """The directory of one run and the places in it."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(root).absolute() / name
        self._claim = ""
        self._journal = Journal(self.events)

    @property
    def config(self) -> Path:
        """What was asked, resolved and complete."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """The snapshot of the code that every attempt runs."""
        return self.path / "code"

    @property
    def job(self) -> Path:
        """What was submitted: script, argv, versions, attempts."""
        return self.path / "job"

    @property
    def metrics(self) -> Path:
        """One line per logged step, written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened: one line each, written by rank 0."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One directory per saved step."""
        return self.path / "checkpoints"

    @property
    def verdict(self) -> Path:
        """How the newest attempt ended."""
        return self.path / "verdict.json"

    def log(self, attempt: int, node: int, rank: int) -> Path:
        """The output of one rank in one attempt."""
        return self.path / "logs" / f"attempt-{attempt}" / f"node-{node}" / f"rank-{rank}.log"

    def create(self) -> bool:
        """Make the directory, for this user alone; whether it was not there.

        Raises:
            OSError: the place cannot be written, or others can write what lies there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = True
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            if not self.path.is_dir():
                raise
            is_new = False
        # In a place such as /tmp others may have put a link or a directory of theirs there.
        link, directory = self.path.lstat(), self.path.stat()
        me = os.geteuid()
        if link.st_uid != me or directory.st_uid != me or directory.st_mode & S_IWOTH:
            reason = "it belongs to another user, or everybody may write there"
            raise PermissionError(errno.EPERM, reason, str(self.path))
        return is_new

    def claim(self) -> None:
        """Make this attempt the one that may write, in place of one that may still be alive.

        Raises:
            OSError: the directory cannot be written.
        """
        self._claim = os.urandom(8).hex()
        write_atomic(self.path / "claim", self._claim + "\n")

    def check_claim(self) -> None:
        """Ask whether this attempt is still the one that may write.

        Raises:
            FencedError: another one has claimed the run since.
        """
        if self._claim and (self.path / "claim").read_text().strip() != self._claim:
            raise FencedError(f"another attempt of run {self.name} has begun: this one ends")

    def record(self, event: str, **fields: Any) -> None:
        """Append one event with the time of day, in seconds since 1970."""
        self._journal.append({"time": time.time(), "event": event, **fields})

    def conclude(self, verdict: Verdict) -> None:
        """Write the verdict of this attempt, unless it is fenced off."""
        with contextlib.suppress(FencedError):
            self.check_claim()
            write_atomic(self.verdict, json.dumps(asdict(verdict)) + "\n")

    def read_verdict(self) -> Verdict | None:
        """The verdict of the newest attempt that came to one."""
        try:
            return Verdict(**json.loads(self.verdict.read_text()))
        except FileNotFoundError:
            return None

    def forget_verdict(self) -> None:
        """Take the last attempt's verdict away: a new attempt has begun."""
        self.verdict.unlink(missing_ok=True)


def named(word: str, holding: str = "") -> Path | None:
    """The directory of this name, here or in runs/, that holds this file; None if neither does."""
    places = (Path(word), Path("runs", word))
    return next((path for path in places if (path / holding).exists()), None)


def default_name(recipe: str) -> str:
    """The name of a run that was given none: the recipe, and the Slurm job or the time.

    A restarted attempt must find its run again: a requeued job keeps its id, and the ranks that
    torchrun starts again have the same parent as before.
    """
    if "SLURM_STEP_ID" in os.environ:
        return f"{recipe}-{os.environ['SLURM_JOB_ID']}"
    begin = time.time()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import psutil  # launch imports this module often and needs no psutil

        begin = psutil.Process(os.getppid()).create_time()
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(begin))}"


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that it is whole or absent, also after a power cut.

    Raises:
        OSError: it could not be written; what was there before is untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor, has_name = _open_beside(path, beside)
        with open(descriptor, "w") as file:  # noqa: PTH123 (a descriptor)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
            if not has_name:
                beside.unlink(missing_ok=True)
                # With a directory, which this path does not need, Python follows the link.
                os.link(f"/proc/self/fd/{descriptor}", beside, src_dir_fd=0)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _open_beside(path: Path, beside: Path) -> tuple[int, bool]:
    """A new file for what is to replace `path`; whether it has the name `beside` already.

    Without a name, who is killed while writing leaves nothing behind.
    """
    try:
        return os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), False
    except OSError:  # NFS has no such files
        return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), True


def sync(path: Path) -> None:
    """Bring a file to disk, or the names in a directory: only then is a rename durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """A line file that outlasts a full disk: what it does not take comes with the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)

    def append(self, fields: dict[str, Any]) -> None:
        """Append one object as a line, or keep it for later."""
        self._waiting.append(fields)
        with contextlib.suppress(OSError):
            while self._waiting:
                append_line(self._path, self._waiting[0])
                self._waiting.popleft()


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """Append one JSON object as a line of its own, also after a line that a crash cut off."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json.dumps(fields).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a line file; a line that a crash cut off is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
