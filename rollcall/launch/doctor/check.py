"""The result of a check, and the machine that it examines."""

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from rollcall.system.fabric import SYSROOT as SYSROOT

State: TypeAlias = Literal["ok", "warning", "bad", "not applicable"]
Value: TypeAlias = str | float | dict[str, str] | None
QUICK, THOROUGH = 8.0, 60.0
"""Seconds for all checks of a node together."""
PROBE = """
import json
import torch
count = torch.cuda.device_count()
build = torch.version.cuda or ""
print(json.dumps(dict(torch=torch.__version__, cuda=build, gpus=count)))
"""


class Result(NamedTuple):
    """The result of a check on one node."""

    state: State
    text: str  # for people, in a few words
    value: Value = None  # should be equal on all nodes; None if nodes may differ
    within: float = 0.0  # by how much a number may differ from the other nodes'


class Skip(Exception):
    """A check does not apply to this machine; the message says why."""


class ToolError(Exception):
    """Something that the check needs is broken; the message says what."""


def judge(problem: object, fine: object, value: Value = None, state: State = "bad") -> Result:
    """Return `problem` in this state, or `fine` if there is no problem."""
    return Result(state, str(problem), value) if problem else Result("ok", str(fine), value)


def warn(problem: object, fine: object, value: Value = None) -> Result:
    """Return the result of `judge` for a problem that does not prevent training."""
    return judge(problem, fine, value, "warning")


def number(text: str | None) -> float:
    """Return the number with which a text begins, 0 without one."""
    match = re.match(r"[\d.]+", text or "")
    return float(match[0]) if match else 0.0


class LocalNode:
    """The machine under examination, and what the job on it needs."""

    meeting: Path | None = None  # a directory for which all nodes of the job are examined now

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
        with contextlib.suppress(OSError):
            return Path(SYSROOT + path).read_text(errors="replace").strip()
        return ""

    def paths(self, pattern: str) -> list[str]:
        """Return the paths of the system that match, without the root of a test."""
        root = Path(SYSROOT or "/")
        with contextlib.suppress(OSError):
            return sorted(f"/{path.relative_to(root)}" for path in root.glob(pattern.lstrip("/")))
        return []

    def run(self, *words: str, seconds: float = 20.0) -> str:
        """Return the output of a program, which runs only once.

        Raises:
            Skip: the program is not installed.
            ToolError: it fails, or does not end within `seconds`.
        """
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
        """Return the versions and devices of torch, which another process imports."""
        answer = self.run(self.python, "-c", PROBE, seconds=THOROUGH)
        return dict(json.loads(answer.splitlines()[-1]))

    def directories(self) -> Iterator[tuple[str, Path]]:
        """Yield the directories of runs, caches and temporary files, or their nearest parents."""
        home = self.env.get("HOME", "/")
        cache = self.env.get("HF_HOME") or self.env.get("XDG_CACHE_HOME") or f"{home}/.cache"
        temporary = self.env.get("TMPDIR", "/tmp")
        paths = {"runs": self.root, "cache": Path(cache), "temporary files": Path(temporary)}
        for name, path in paths.items():
            yield name, next(folder for folder in (path, *path.parents) if folder.is_dir())

    def _answer(self, words: Sequence[str], seconds: float) -> str | Exception:
        name, null, pipe = Path(words[0]).name, subprocess.DEVNULL, subprocess.PIPE
        try:
            child = subprocess.Popen(words, stdin=null, stdout=pipe, stderr=pipe, errors="replace")
        except OSError:
            return Skip(f"{name} is not installed")
        self._started.append(child)
        try:
            output, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            return ToolError(f"{name} does not answer within {seconds:.0f} s")
        if child.returncode == 0:
            return output
        reason = errors.strip() or output.strip() or f"exit code {child.returncode}"
        return ToolError(f"{name} fails: {reason.splitlines()[-1]}")
