"""Whose turn it is to build, among processes of any number of nodes on a shared file system.

The folder of an environment holds ``ready`` (written last, names the virtual environment to use),
``lock.N`` (somebody builds) and ``failed`` (why the last one could not). A lock is a file created
exclusively, which also holds on Lustre and NFS where flock may not. Its owner rewrites it every few
seconds; one that no longer changes belongs to a dead owner, and whoever creates the next number has
its turn, so that two can never take over at once. A lock only saves work: every builder fills a
folder of its own, so that a builder thought dead by mistake does no harm.
"""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from choose import CannotBuild

BEAT_S = 5.0
DEAD_S = 60.0  # a lock unchanged for so long has no living owner
POLL_S = 0.5


class Lock:
    """The right to build in ``folder``, kept alive by a thread until released."""

    def __init__(self, folder: Path, number: int) -> None:
        """Create the lock file; FileExistsError when another process was quicker."""
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
        os.fsync(self._file)  # NFS shows a write to other nodes only once it is flushed

    def release(self) -> None:
        """Stop the heartbeat and remove the lock."""
        self._done.set()
        self._thread.join()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def take_turn(folder: Path, say: Callable[[str], None]) -> Lock | None:
    """Wait until ``folder`` is ready (None) or ours to build in (its lock).

    Raises:
        CannotBuild: with the builder's reason, when the one that we waited for failed.
    """
    seen, since, waited = "", time.monotonic(), False
    while True:
        # One listing per look: NFS may cache the answer for single names, one missing above all.
        names = [path.name for path in folder.iterdir()]
        if "ready" in names:
            return None
        last = max((int(name[5:]) for name in names if name.startswith("lock.")), default=-1)
        if last < 0:
            if waited and "failed" in names:
                raise CannotBuild((folder / "failed").read_text().strip())
        else:
            owner = _read(folder / f"lock.{last}")
            if owner != seen:
                seen, since = owner, time.monotonic()
            if not _is_dead(owner) and time.monotonic() - since < DEAD_S:
                if owner and not waited:
                    host, pid, _ = owner.split()
                    say(f"waiting for process {pid} on {host}, which is making this environment")
                    waited = True
                time.sleep(POLL_S)
                continue
        lock = _try_lock(folder, last + 1)
        if lock and not (folder / "ready").exists():
            _clear(folder, keep=lock.path.name)
            return lock
        if lock:
            lock.release()


def _clear(folder: Path, keep: str) -> None:
    # Remove what earlier builders left: their locks, their notes, half an environment.
    for path in folder.iterdir():
        if path.name.startswith("venv-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(("lock.", "failed")) and path.name != keep:
            path.unlink(missing_ok=True)


def _try_lock(folder: Path, number: int) -> Lock | None:
    try:
        return Lock(folder, number)
    except FileExistsError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _is_dead(owner: str) -> bool:
    # Only a process of this host can be asked; any other shows by its heartbeat that it lives.
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
