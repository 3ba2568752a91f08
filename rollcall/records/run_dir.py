"""The run directory: the plain files of a run, each with one writer. No torch.

A file is either whole or absent. Line files (metrics, events) only grow; readers leave out a line
that a crash cut off. rollcall.records has the names and keys of the files.
"""

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from stat import S_IWOTH
from typing import Any, Self

from rollcall.messages.text import word
from rollcall.records.run import CLAIM, EVENTS, LoggedStep, read_events
from rollcall.records.run import State as State
from rollcall.records.run import Verdict as Verdict
from rollcall.system.files import Journal, is_there, listed, read_whole, remove, write_atomic


class FencedError(OSError):
    """Another attempt of the run has begun: this one may not write checkpoints or a verdict."""


class RunDir:
    """The directory of one run, and the files and folders in it."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.name = name
        self.path = path = Path(root).absolute() / name
        self.config = path / "config.yaml"  # the complete configuration, with defaults filled in
        self.code = path / "code"  # the snapshot of the code that every attempt runs
        self.job = path / "job"  # the submissions and their attempts
        self.launcher = path / "job/rollcall"  # the copy of rollcall, if `code/` is the user's code
        self.metrics = path / LoggedStep.FILE  # one line per logged step, written by rank 0
        self.events = path / EVENTS  # one line per event, written by rank 0
        self.samples = path / "samples"  # images drawn in evaluations, written by rank 0
        self.checkpoints = path / "checkpoints"  # one directory per saved step
        self.faults = path / "faults"  # what is known about steps that failed
        self.verdict = path / Verdict.FILE  # how the newest attempt ended
        self.logs = path / "logs"  # one directory per attempt
        self.logs_by_hand = path / "logs/by-hand"  # failures of ranks without a supervisor
        self._claim, self._fenced = "", f"another attempt of run {name} has begun: this one ends"
        self._journal = Journal(self.events)

    @classmethod
    def unused(cls, root: str | Path, stem: str) -> Self:
        """Return a run of this name, or with a number appended if the directory exists."""
        names = (f"{stem}-{number}" if number > 1 else stem for number in itertools.count(1))
        return next(run for run in (cls(root, name) for name in names) if not run.path.exists())

    @property
    def words(self) -> tuple[str, str]:
        """The words on a training's command line that select this run."""
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
        matches = (re.fullmatch(r"attempt-([0-9]{1,9})", path.name) for path in paths)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    def attempt_of(self, descriptor: int) -> int | None:
        """Return the attempt of which an open file is a rank's log; None if it is another file."""
        file = str(Path(f"/proc/self/fd/{descriptor}").resolve())
        match = re.fullmatch(r"/attempt-([0-9]+)/.*", file.removeprefix(str(self.logs.resolve())))
        return int(match[1]) if match else None

    def log(self, attempt: int, node: int, rank: int) -> Path:
        """Return the file with the output of one rank in one attempt."""
        return self.attempt_logs(attempt) / f"node-{node}" / f"rank-{rank}.log"

    def create(self) -> bool:
        """Make the directory for this user only, where git ignores it; return True if it is new.

        Raises:
            OSError: it cannot be made, belongs to another user, or others can write to it.
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
        # In a shared folder such as /tmp, another user may have made a link or directory there.
        link, directory = self.path.lstat(), self.path.stat()
        if {link.st_uid, directory.st_uid} != {os.geteuid()} or directory.st_mode & S_IWOTH:
            reason = "it belongs to another user, or everybody may write there"
            raise PermissionError(errno.EPERM, reason, str(self.path))
        return is_new

    def claim(self, attempt: int | None) -> None:
        """Make this attempt the only one that may write; an older one may still be alive.

        Each attempt has its own file, so one that has stood still cannot take the run back; one
        without a number takes the next. FencedError is raised if a newer one has begun.
        """
        claims = self._claims()  # before the look at the attempts
        if attempt is not None and attempt < self.next_attempt() - 1:
            raise FencedError(self._fenced)
        number = max([attempt or 0, *claims])
        if attempt is None and not self._claim:
            number = max([self.next_attempt(), *(other + 1 for other in claims)])
        word = self._claim.partition("-")[2] or os.urandom(8).hex()  # other ranks know it, too
        write_atomic(self.path / CLAIM.format(number), f"{word}\n")
        self._claim = f"{number}-{word}"
        for older in (path for other, path in claims.items() if other < number):
            remove(older)
        remove(self.path / "claim")  # of an earlier version

    def _claims(self) -> dict[int, Path]:
        paths = listed(self.path, CLAIM.format("*"))
        numbers = (path.name.rpartition("-")[2] for path in paths)
        return {int(n): path for n, path in zip(numbers, paths, strict=True) if n.isdecimal()}

    def share_claim(self, broadcast: Callable[[str], str]) -> str:
        """Return the text of the claim, which is the one that a function gives all ranks."""
        self._claim = broadcast(self._claim)
        return self._claim

    def check_claim(self) -> None:
        """Raise FencedError if another attempt has claimed the run since."""
        if not self._claim:
            return
        number, _, word = self._claim.partition("-")
        try:
            content = (self.path / CLAIM.format(number)).read_bytes()
        except FileNotFoundError:  # a newer attempt removes it
            if max(self._claims(), default=-1) <= int(number):
                raise
            content = b""
        if content.strip() != word.encode() or max(self._claims(), default=-1) > int(number):
            raise FencedError(self._fenced)

    def record(self, event: str, /, **fields: Any) -> None:
        """Append an event with the time, in seconds since 1970."""
        self._journal.append({"time": time.time(), "event": event, **fields})

    def read_events(self, *names: str) -> list[dict[str, Any]]:
        """Read the events with these names, or all; see `records.read_events`."""
        return read_events(self.path, *names)

    def add_samples(self, step: int, png: bytes) -> None:
        """Keep an image that the model of this step has drawn."""
        self.samples.mkdir(exist_ok=True)
        write_atomic(self.samples / f"step-{step:08}.png", png)

    def read_samples(self, most: int) -> dict[int, bytes]:
        """Return the newest images by step, but for unreadable ones."""
        images = {}
        for path in listed(self.samples, "step-????????.png")[-most:]:
            with contextlib.suppress(OSError, ValueError):
                images[int(path.stem.removeprefix("step-"))] = read_whole(path, 2**22)
        return images

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
    paths = (Path(word), Path("runs", word))
    return next((path for path in paths if is_there(path / holding)), None)


def plain(stem: str) -> str:
    """Turn a text, such as the name of a file, into a valid `run.name`."""
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
        import psutil  # here, because launch imports this module often and does not need psutil

        begin = psutil.Process(os.getppid()).create_time()
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(begin))}"
