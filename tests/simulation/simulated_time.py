"""Threads that run one at a time, by a simulated clock.

A task is a thread of a simulated process. It runs until it sleeps or waits; then it hands over to
the task, or the action, that is next by the clock. So the order of all events, and with it every
run, depends only on a seed.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

STACK_BYTES = 512 * 1024
"""Stack of a thread: a simulation has thousands of them."""
MOST_EVENTS = 100_000
"""Events of each host after which a simulation counts as one that never ends."""


class Killed(BaseException):
    """Ends a thread whose process is gone, when the simulation is over."""


class StuckError(Exception):
    """Nothing happens any more, though some processes have not ended; or no end is in sight."""


@dataclass(eq=False)
class Process:
    """A process of a simulated host."""

    host: Any
    name: str
    pid: int
    is_dead: bool = False
    is_stopped: bool = False  # by SIGSTOP
    signals: list[int] = field(default_factory=list)  # that wait to be taken
    waiter: Task | None = None  # the task that waits for a signal
    environ: dict[str, str] = field(default_factory=dict)
    held: list[tuple[Task, int]] = field(default_factory=list)  # would run if it were not stopped

    @property
    def is_halted(self) -> bool:
        """True while it does not run, because it or its host is stopped."""
        return self.is_stopped or self.host.is_frozen


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, function: Callable[[], object]) -> None:
        self.process, self._function = process, function
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wait = 0  # counts its waits, so that a timer of an earlier wait is not taken for new
        self.is_over = self.must_end = False
        self.watchers: list[Task] = []  # that wait for its end
        self.thread: threading.Thread | None = None


_local = threading.local()


def current() -> Task | None:
    """Return the task of this thread; None outside of a simulation."""
    return getattr(_local, "task", None)


class Clock:
    """The clock, and what is to happen by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events, self.most_events = 0, MOST_EVENTS
        self.error: BaseException | None = None
        self._heap: list[tuple[float, int, Any, int]] = []
        self._order = count()
        self._tasks: list[Task] = []
        self._driver = Task(Process(None, "driver", 0), lambda: None)
        self._is_finished: Callable[[], bool] = lambda: False

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do something at a time, in no process; it must not wait."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, 0))

    def spawn(self, process: Process, function: Callable[[], object]) -> Task:
        """Start a thread of a process."""
        task = Task(process, function)
        self._tasks.append(task)
        self._push(self.now, task)
        return task

    def run(self, until: float, is_finished: Callable[[], bool]) -> None:
        """Let time pass until the simulation is finished.

        Raises:
            StuckError: nothing more can happen, or it has not finished by `until`.
        """
        self._is_finished, self._until = is_finished, until
        self._hand_over(self._driver)
        if self.error is not None:
            raise self.error

    def sleep(self, seconds: float) -> None:
        """Let time pass for this task."""
        task = self.task()
        task.wait += 1
        self._push(self.now + seconds, task)
        self._hand_over(task)

    def park(self, timeout: float | None = None) -> None:
        """Wait until `wake` is called for this task, or the timeout is over."""
        task = self.task()
        task.wait += 1
        if timeout is not None:
            self._push(self.now + timeout, task)
        self._hand_over(task)

    def wake(self, task: Task | None) -> None:
        """End the wait of a task."""
        if task is not None:
            self._push(self.now, task)

    def resume(self, process: Process) -> None:
        """Let the tasks of a process that was stopped run on."""
        if not process.is_halted:
            for task, wait in process.held:
                heapq.heappush(self._heap, (self.now, next(self._order), task, wait))
            process.held.clear()

    def join(self, task: Task) -> None:
        """Wait for the end of another task."""
        while not task.is_over:
            task.watchers.append(self.task())
            self.park()

    def task(self) -> Task:
        """Return the task of this thread; end the thread if the simulation is over."""
        task: Task = _local.task
        if task.must_end:
            raise Killed
        return task

    def close(self) -> None:
        """End all threads."""
        for task in self._tasks:
            task.must_end = True
            if task.thread is not None and not task.is_over:
                task.turn.release()
                task.thread.join()

    def _push(self, when: float, task: Task) -> None:
        heapq.heappush(self._heap, (when, next(self._order), task, task.wait))

    def _hand_over(self, task: Task | None) -> None:
        chosen = self._next()
        if chosen is task:
            return
        if chosen.thread is None and chosen is not self._driver:
            chosen.thread = threading.Thread(target=self._body, args=[chosen], daemon=True)
            chosen.thread.start()
        else:
            chosen.turn.release()
        if task is not None:
            task.turn.acquire()
            if task.must_end:
                raise Killed

    def _next(self) -> Task:
        """Return the next task to run; do what comes before it."""
        try:
            while self.error is None and not self._is_finished():
                if (
                    not self._heap
                    or self._heap[0][0] > self._until
                    or self.events > self.most_events
                ):
                    raise StuckError(f"not finished after {self.now:.0f} s, {self.events} events")
                self.now, _, chosen, wait = heapq.heappop(self._heap)
                if not isinstance(chosen, Task):
                    chosen()
                elif chosen.is_over or chosen.wait != wait or chosen.process.is_dead:
                    continue
                elif chosen.process.is_halted:
                    chosen.process.held.append((chosen, wait))
                else:
                    self.events += 1
                    chosen.wait += 1  # what else would have woken it comes too late
                    return chosen
        except BaseException as error:
            self.error = error
        return self._driver

    def _body(self, task: Task) -> None:
        _local.task = task
        try:
            task._function()
        except Killed:
            pass
        except BaseException as error:
            self.error = self.error or error
        task.is_over = True
        if not task.must_end:
            for other in task.watchers:
                self.wake(other)
            self._hand_over(None)
