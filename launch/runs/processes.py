"""The processes on this machine that started a run's local jobs, from one look at /proc."""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from rollcall.launch.runs.find import SubmittedJob
from rollcall.process import stat
from rollcall.run_dir import RunDir

T = TypeVar("T")


class Processes:
    """The processes of this machine, read once, when they are needed."""

    def of(self, run: RunDir, job: SubmittedJob) -> list[int]:
        """Return the processes that started a local job's nodes; none once it has ended.

        If the job's own process was killed, these are its supervisors, or the processes of its
        tasks if it is an array.
        """
        known = self._controllers.get(int(job.id) if job.id.isdecimal() else 0)
        if known is not None and known == run.job.resolve():
            return [int(job.id)]
        place = run.path.resolve()
        if of_tasks := self._controllers_below.get(place):
            return of_tasks
        # A supervisor without a controller is the parent of an agent that writes the run's logs.
        ours = dict(self._agents_below.get(place, ()))
        return sorted(set(ours.values()) - set(ours))

    @cached_property
    def _controllers(self) -> dict[int, Path]:
        """The job/ of each of submitit's controllers, by its process id."""
        ours = [item for item in self._words.items() if "submitit.local._local" in item[1]]
        return {int(pid): Path(words[-1]).resolve() for pid, words in ours}

    @cached_property
    def _words(self) -> dict[str, list[str]]:
        """The command line of each process by its id."""
        names = os.listdir("/proc")  # noqa: PTH208 (names, not paths)
        return {name: _words_of(name) for name in names if name.isdecimal()}

    @cached_property
    def _controllers_below(self) -> dict[Path, list[int]]:
        return _below((path, pid) for pid, path in self._controllers.items())

    @cached_property
    def _agents_below(self) -> dict[Path, list[tuple[int, int]]]:
        """Process ids of ranks and of their starters, each with its parent's, by place of logs."""
        found = []
        for pid, words in self._words.items():
            if (logs := log_directory(words)) is not None and (fields := stat(pid)):
                found.append((logs, (int(pid), int(fields[1]))))
        return _below((logs, pids) for logs, pids in found if pids[1] > 1)


def _below(found: Iterable[tuple[Path, T]]) -> dict[Path, list[T]]:
    """Return what lies below each directory: a table, since there may be thousands of runs."""
    table: dict[Path, list[T]] = {}
    for path, one in found:
        for above in path.parents:
            table.setdefault(above, []).append(one)
    return table


def log_directory(words: Sequence[str]) -> Path | None:
    """Return where an agent or rank with this command line writes its logs; None for others."""
    option = "--log-dir="
    found = next((word for word in words if word.startswith(option)), None)
    return None if found is None else Path(found.removeprefix(option)).resolve()


def _words_of(pid: str) -> list[str]:
    """Return a process's command line; none if it has ended, or for a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 (a third of the time)
            text = os.fsdecode(file.read()).removesuffix("\0")
            return text.split("\0") if text else []
    except OSError:
        return []
