"""The run directory: where a run keeps things, as plain files with one writer each. No torch.

A file is either whole or absent. Line files (metrics, events) only grow; a line that a crash cut
off is left out on reading. rollcall.records has the names and keys of the files.
"""

import contextlib
import errno
import itertools
import os
import re
import time
from pathlib import Path
from stat import S_IWOTH
from typing import Any, Self

from rollcall.records.files import Journal, is_there, listed, remove, write_atomic
from rollcall.records.run import CLAIM, EVENTS, LoggedStep, read_events
from rollcall.records.run import State as State
from rollcall.records.run import Verdict as Verdict
from rollcall.text import word


class FencedError(OSError):
    """Another attempt of the run has begun: this one may write no checkpoint and no verdict."""


class _Place:
    """A file or a folder of a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", _: type) -> Path:
        return run.path / self._name


class RunDir:
    """The directory of one run and the places in it."""

    config = _Place("config.yaml")
    """The complete configuration, with defaults filled in."""
    code = _Place("code")
    """The snapshot of the code that every attempt runs."""
    job = _Place("job")
    """What was submitted and how its attempts went."""
    launcher = _Place("job/rollcall")
    """The copy of rollcall, if `code/` is the user's code."""
    metrics = _Place(LoggedStep.FILE)
    """One line per logged step, written by rank 0."""
    events = _Place(EVENTS)
    """One line per event, written by rank 0."""
    checkpoints = _Place("checkpoints")
    """One directory per saved step."""
    verdict = _Place(Verdict.FILE)
    """How the newest attempt ended."""
    logs = _Place("logs")
    """One directory per attempt."""
    logs_by_hand = _Place("logs/by-hand")
    """In which ranks without a supervisor record their failures."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(root).absolute() / name
        self._claim = b""
        self._journal = Journal(self.events)

    @classmethod
    def unused(cls, root: str | Path, stem: str) -> Self:
        """Return a run of this name, or with a number behind it if there is such a directory."""
        names = (f"{stem}-{number}" if number > 1 else stem for number in itertools.count(1))
        return next(run for run in (cls(root, name) for name in names) if not run.path.exists())

    @property
    def words(self) -> tuple[str, str]:
        """The words that make a training this run."""
        return word("run.name", self.name), word("run.root", str(self.path.parent))

    def modules(self, number: int) -> Path:
        """Return the copy of the user's modules from the `number`-th directory."""
        return self.job / "modules" / str(number)

    def attempt_logs(self, attempt: int) -> Path:
        """Return the directory of an attempt's logs, which has a directory for each node."""
        return self.logs / f"attempt-{attempt}"

    def next_attempt(self) -> int:
        """Return the number of an attempt that has no logs yet."""
        paths = listed(self.logs, "attempt-*")
        found = (re.fullmatch(r"attempt-([0-9]{1,9})", path.name) for path in paths)
        return 1 + max((int(match[1]) for match in found if match), default=-1)

    def keeps(self, descriptor: int) -> bool:
        """Return whether an open file is one of this run's logs."""
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        return self.logs.resolve() in file.parents

    def log(self, attempt: int, node: int, rank: int) -> Path:
        """Return the file with the output of one rank in one attempt."""
        return self.attempt_logs(attempt) / f"node-{node}" / f"rank-{rank}.log"

    def create(self) -> bool:
        """Make the directory, readable by this user only, below one that git ignores.

        Return whether it is new.

        Raises:
            OSError: the place cannot be written, or others can write what lies there.
        """
        root, is_new = self.path.parent, True
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # the disk is full: the run itself will say so
                (root / ".gitignore").write_text("*\n")
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            if not self.path.is_dir():
                raise
            is_new = False
        # In a place such as /tmp, others may have put a link or a directory of theirs there.
        link, directory = self.path.lstat(), self.path.stat()
        me = os.geteuid()
        if link.st_uid != me or directory.st_uid != me or directory.st_mode & S_IWOTH:
            reason = "it belongs to another user, or everybody may write there"
            raise PermissionError(errno.EPERM, reason, str(self.path))
        return is_new

    def claim(self) -> None:
        """Make this attempt the only one that may write; an older one may still be alive."""
        word = os.urandom(8).hex()
        self._claim = word.encode()
        write_atomic(self.path / CLAIM, word + "\n")

    def check_claim(self) -> None:
        """Raise FencedError if another attempt has claimed the run since."""
        if self._claim and (self.path / CLAIM).read_bytes().strip() != self._claim:
            raise FencedError(f"another attempt of run {self.name} has begun: this one ends")

    def record(self, event: str, /, **fields: Any) -> None:
        """Append an event with the time, in seconds since 1970."""
        self._journal.append({"time": time.time(), "event": event, **fields})

    def read_events(self, *names: str) -> list[dict[str, Any]]:
        """Read the events with these names, or all; see `records.read_events`."""
        return read_events(self.path, *names)

    def read_metrics(self) -> list[LoggedStep]:
        """Read all logged steps."""
        return LoggedStep.read(self.path)

    def conclude(self, verdict: Verdict) -> None:
        """Write the verdict of this attempt, unless it is fenced off."""
        with contextlib.suppress(FencedError):
            self.check_claim()
            verdict.write(self.path)

    def try_to_conclude(self, verdict: Verdict) -> str:
        """Write the verdict like `conclude`; return why it could not be written, or nothing."""
        try:
            self.conclude(verdict)
        except OSError as error:
            return f"the verdict could not be written: {error.strerror}"
        return ""

    def read_verdict(self) -> Verdict | None:
        """Return the verdict of the newest attempt; None if it has written none."""
        return Verdict.read(self.path)

    def forget_verdict(self) -> None:
        """Remove the last attempt's verdict, because a new attempt has begun."""
        remove(self.verdict)


def named(word: str, holding: str = "") -> Path | None:
    """Return the directory of this name, here or in runs/, that holds a file; None if neither."""
    places = (Path(word), Path("runs", word))
    return next((path for path in places if is_there(path / holding)), None)


def plain(stem: str) -> str:
    """Return a text such as the name of a file as `run.name` may be."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")[:80] or "run"


def default_name(recipe: str) -> str:
    """Name a run after its recipe and the Slurm job or the time.

    A restarted attempt must find its run again: a requeued job keeps its id, and ranks that
    torchrun restarts have the same parent as before.
    """
    recipe = plain(recipe)
    if "SLURM_STEP_ID" in os.environ:
        return f"{recipe}-{os.environ['SLURM_JOB_ID']}"
    begin = time.time()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import psutil  # here, because launch imports this module often and needs no psutil

        begin = psutil.Process(os.getppid()).create_time()
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(begin))}"
