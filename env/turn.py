"""Decide which process builds, among processes on any number of nodes with a shared file system.

The folder of an environment contains ``ready`` (written last; names the environment to use),
``lock.N`` (a process is building) and ``failed`` (why the last build failed). A lock is a file
created exclusively, which also works on Lustre and NFS, where flock may not. Its owner rewrites it
every few seconds. If a lock no longer changes, its owner is dead, and the process that creates the
next number builds; two processes can never take over at once. A lock only saves work: every builder
fills a separate folder, so a builder that is wrongly believed dead does no harm.
"""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from choose import CannotBuild

BEAT_S = 5.0
DEAD_S = 60.0  # if a lock has not changed for this long, its owner is dead
POLL_S = 0.5


class Lock:
    """The right to build in ``folder``, kept alive by a thread until released."""

    def __init__(self, folder: Path, number: int) -> None:
        """Create the lock file; raise FileExistsError if another process was faster."""
        self.path = folder / f"lock.{number}"
        self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._done = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._beats, daemon=True)
        self._thread.start()

    def _beats(self) -> None:
        beat = 0
        while not self._done.wait(BEAT_S):
            beat += 1
            self._beat(beat)

    def _beat(self, beat: int) -> None:
        os.pwrite(self._file, f"{socket.gethostname()} {os.getpid()} {beat}\n".encode(), 0)
        os.fsync(self._file)  # on NFS, other nodes see a write only after it is flushed

    def release(self) -> None:
        """Stop the heartbeat and remove the lock."""
        self._done.set()
        self._thread.join()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def take_turn(folder: Path, say: Callable[[str], None]) -> Lock | None:
    """Wait until ``folder`` is ready (return None) or this process may build (return its lock).

    Raises:
        CannotBuild: another process built and failed; the message is its reason.
    """
    seen, since, waited = "", time.monotonic(), False
    while True:
        # List the folder: for single names, missing ones above all, NFS may return a cached answer.
        names = [path.name for path in folder.iterdir()]
        if "ready" in names:
            return None
        last = max((int(name[5:]) for name in names if name.startswith("lock.")), default=-1)
        if last < 0:
            if waited and "failed" in names:
                raise CannotBuild(read(folder / "failed"))
        else:
            owner = read(folder / f"lock.{last}")
            if owner != seen:
                seen, since = owner, time.monotonic()
            if not _is_dead(owner) and time.monotonic() - since < DEAD_S:
                if owner and not waited:
                    host, pid, _ = owner.split()
                    say(f"waiting for process {pid} on {host}, which is making this environment")
                    waited = True
                time.sleep(POLL_S)
                continue
        lock = None
        with contextlib.suppress(FileExistsError):
            lock = Lock(folder, last + 1)
        if lock and not (folder / "ready").exists():
            _clear(folder, keep=lock.path.name)
            return lock
        if lock:
            lock.release()


def _clear(folder: Path, keep: str) -> None:
    # Remove what earlier builders left: locks, reasons of failures, unfinished environments.
    for path in folder.iterdir():
        if path.name.startswith("venv-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(("lock.", "failed")) and path.name != keep:
            path.unlink(missing_ok=True)


def read(path: Path) -> str:
    """Read a short file; return an empty string if it is missing."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _is_dead(owner: str) -> bool:
    # Only processes on this host can be checked; others are alive as long as their lock changes.
    host, _, rest = owner.partition(" ")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(rest.split()[0]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
