"""The result of a check, and the machine that it looks at."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from rollcall.fabric import SYSROOT as SYSROOT

State: TypeAlias = Literal["ok", "warning", "bad", "not applicable"]
Value: TypeAlias = str | float | dict[str, str] | None
QUICK, THOROUGH = 8.0, 60.0
"""Seconds for all checks of a node together."""
PROBE = """
import json, time
begin = time.perf_counter()
import torch
took = time.perf_counter() - begin
count = torch.cuda.device_count()
build = torch.version.cuda or ""
print(json.dumps(dict(torch=torch.__version__, cuda=build, seconds=took, gpus=count)))
"""


class Found(NamedTuple):
    """What a check found on one node."""

    state: State
    text: str  # for people, in a few words
    value: Value = None  # what all nodes should have in common; None if that does not matter
    within: float = 0.0  # by how much a number may differ from the other nodes'


class Skip(Exception):
    """A check does not apply to this machine; the message says why."""


class Failed(Exception):
    """Something that the check needs is broken; the message says what."""


def ok(text: object, value: Value = None, within: float = 0.0) -> Found:
    """Return that nothing is wrong."""
    return Found("ok", str(text), value, within)


def judge(problem: object, fine: object, value: Value = None, state: State = "bad") -> Found:
    """Return `problem` if it says anything, else that all is `fine`."""
    return Found(state, str(problem), value) if problem else Found("ok", str(fine), value)


def warn(problem: object, fine: object, value: Value = None) -> Found:
    """Do the same for a problem that does not prevent training."""
    return judge(problem, fine, value, "warning")


class Node:
    """The machine that is checked, and what the job on it needs."""

    def __init__(
        self, root: Path, python: str, hosts: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.root, self.env = root, env  # the directory of the runs; the job's environment
        self.python, self.hosts = python, hosts  # interpreter of the ranks; all hosts of the job
        self._answers: dict[Sequence[str], str | Exception] = {}
        self._locks: dict[Sequence[str], threading.Lock] = {}
        self._started: list[subprocess.Popen[str]] = []

    def read(self, path: str) -> str:
        """Return the text of a file of the system; empty if it cannot be read."""
        try:
            return Path(SYSROOT + path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def cgroup(self, name: str) -> str:
        """Return a value of the innermost control group (version 2) that sets it."""
        lines = self.read("/proc/self/cgroup").splitlines()
        own = Path(next((line[3:] for line in lines if line.startswith("0::")), "/"))
        found = (self.read(f"/sys/fs/cgroup{path}/{name}") for path in (own, *own.parents))
        return next((text for text in found if text and not text.startswith("max")), "")

    def paths(self, pattern: str) -> list[str]:
        """Return the paths of the system that match, without the root of a test."""
        with contextlib.suppress(OSError):
            found = Path(SYSROOT or "/").glob(pattern.lstrip("/"))
            return sorted("/" + str(path.relative_to(SYSROOT or "/")) for path in found)
        return []

    def run(self, *words: str, seconds: float = 20.0) -> str:
        """Return what a program prints; raise Skip if it is not there, Failed if it fails."""
        with self._locks.setdefault(words, threading.Lock()):
            if words not in self._answers:
                self._answers[words] = self._answer(words, seconds)
        if isinstance(answer := self._answers[words], Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End the programs that have not answered yet."""
        for process in self._started:
            process.kill()

    def torch(self) -> dict[str, Any]:
        """Return what torch says of itself, from another process."""
        answer = self.run(self.python, "-c", PROBE, seconds=THOROUGH)
        return dict(json.loads(answer.splitlines()[-1]))

    def places(self) -> Iterator[tuple[str, Path]]:
        """Yield the directories of runs, caches and temporary files, or what exists of them."""
        home = self.env.get("HOME", "/")
        cache = self.env.get("HF_HOME") or self.env.get("XDG_CACHE_HOME") or f"{home}/.cache"
        temporary = Path(self.env.get("TMPDIR", "/tmp"))
        for name, path in (
            ("runs", self.root),
            ("cache", Path(cache)),
            ("temporary files", temporary),
        ):
            yield name, next(place for place in (path, *path.parents) if place.is_dir())

    def _answer(self, words: Sequence[str], seconds: float) -> str | Exception:
        name, null, pipe = Path(words[0]).name, subprocess.DEVNULL, subprocess.PIPE
        try:
            process = subprocess.Popen(
                words, stdin=null, stdout=pipe, stderr=pipe, errors="replace"
            )
        except OSError:
            return Skip(f"{name} is not installed")
        self._started.append(process)
        try:
            answer, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return Failed(f"{name} does not answer within {seconds:.0f} s")
        if process.returncode == 0:
            return answer
        last = (said.strip() or answer.strip() or f"exit code {process.returncode}").splitlines()
        return Failed(f"{name} fails: {last[-1]}")
