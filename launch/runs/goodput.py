"""Where the time of a run went, over all its attempts and jobs, from its records alone.

Goodput is the share of the time from the submission to the end in which steps were done that count:
https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcall.launch.runs import find, restarts, states
from rollcall.records.attempt import AttemptEvent
from rollcall.records.job import Restart, Submission
from rollcall.records.run import ForgottenStep, LoggedStep
from rollcall.run_dir import RunDir

SHARES = {
    "productive": "steps, the first time they were done",
    "queue": "waiting for the scheduler",
    "startup": "from the start of the ranks to the first step done",
    "data wait": "steps waited for data",
    "checkpoint": "saves held up the training",
    "evaluation": "validation",
    "repeated": "steps done again after a restart or a rollback",
    "lost": "work that a fault destroyed, and the time until it was noticed",
    "restart": "from the end of an attempt to the start of the next one",
    "other": "after the last step of an attempt; programs that log no steps",
}
"""The names of the shares, and what each holds."""
ENDS = ("signalled", "finished")


@dataclass(frozen=True)
class Goodput:
    """What became of the time of a run."""

    wall: float  # seconds from the submission or the first start to the end, or to now
    shares: dict[str, float]  # seconds by the names of SHARES; they add up to `wall`
    attempts: int
    repeated_steps: int  # how many steps were done again
    is_live: bool

    @property
    def productive(self) -> float:
        """The goodput, from 0 to 1."""
        return self.shares["productive"] / self.wall if self.wall else 0.0


@dataclass(frozen=True)
class _Attempt:
    start: float
    end: float | None = None  # None if nothing was written
    job: str = ""
    has_failed: bool = True  # or has vanished


def goodput(run: RunDir) -> Goodput | None:
    """Return where the time of a run went; None if it has never started.

    Times are by the clocks of the nodes that wrote the records. Steps are known as far as they
    were logged: those between the last line of metrics.jsonl and a fault count as lost.
    """
    attempts = _attempts(run)
    if not attempts:
        return None
    submissions = [each.time for each in Submission.read(run.path)]
    (condition,), _ = states.look([run])
    book = _Book(run, min([attempts[0].start, *submissions]))
    for number, attempt in enumerate(attempts):
        book.wait(attempt, attempts[number - 1] if number else None, submissions)
        is_last = number == len(attempts) - 1
        until = (time.time() if condition.is_live else None) if is_last else attempts[number + 1]
        book.attempt(attempt, until.start if isinstance(until, _Attempt) else until, is_last)
    if condition.is_live and attempts[-1].end is not None:
        ends = condition.state == "pending"
        book.spend("queue" if ends else "restart", time.time())
    reached = book.step
    if not condition.is_live and attempts[-1].has_failed:
        reached = min(reached, restarts.saved_step(run))
    book.take_back(reached)
    return Goodput(
        sum(book.seconds.values()), book.seconds, len(attempts), book.again, condition.is_live
    )


def _attempts(run: RunDir) -> list[_Attempt]:
    """Return the starts of a run by its launcher, and those that ranks without one recorded."""
    found: dict[int, _Attempt] = {}
    for line in AttemptEvent.read(run.path):
        if line.event == "started":
            found[line.attempt] = _Attempt(line.time, job=line.job)
        elif line.attempt in found:
            start, failed = found[line.attempt].start, line.state == "failed"
            found[line.attempt] = _Attempt(start, line.time, line.job, failed)
    known = [*found.values()]
    by_hand: list[_Attempt] = []
    for event in run.read_events("started", "finished", "failed"):
        at = event["time"]
        if any(each.start <= at and (each.end is None or at <= each.end) for each in known):
            continue
        if event["event"] == "started":
            by_hand.append(_Attempt(at))
        elif by_hand:
            by_hand[-1] = _Attempt(by_hand[-1].start, at, "", event["event"] == "failed")
    return sorted([*known, *by_hand], key=lambda each: each.start)


class _Book:
    """Books every second since the beginning exactly once."""

    def __init__(self, run: RunDir, begin: float) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self.step = self.again = 0  # the newest step; how many were done again
        self._now = begin
        self._most = 0  # the newest step of all attempts
        self._counted: list[tuple[int, int, float]] = []  # steps from, to, productive seconds
        self._events = run.read_events()
        lines = {(line.time, line.step): line for line in run.read_metrics()}
        lines |= {(line.time, line.step): line for line in ForgottenStep.read(run.path)}
        self._lines = [lines[key] for key in sorted(lines)]
        self._restarts = Restart.read(run.path)
        self._local = {job.id for job in find.jobs(run) if job.is_local}

    def spend(self, name: str, until: float, parts: Mapping[str, float] | None = None) -> float:
        """Book the time until then: first the parts, by share, as far as they fit, then the rest.

        Return the rest.
        """
        left = max(0.0, until - self._now)
        for part, seconds in (parts or {}).items():
            taken = min(left, max(0.0, seconds))
            self.seconds[part] += taken
            left -= taken
        self.seconds[name] += left
        self._now = max(self._now, until)
        return left

    def wait(
        self, attempt: _Attempt, before: _Attempt | None, submissions: Sequence[float]
    ) -> None:
        """Book the time before an attempt."""
        asked = [at for at in submissions if self._now <= at <= attempt.start]
        noted = [line for line in self._restarts if self._now <= line.time <= attempt.start]
        if before and noted and before.end is None:
            self.spend("lost", noted[0].time)
        if asked and before:
            self.spend("restart", asked[0])
        is_same_job = before is not None and before.job == attempt.job
        is_queued = noted[-1].is_queued if noted else bool(attempt.job) and not before
        is_queued |= bool(asked) or (is_same_job and not noted and not before.has_failed)  # type: ignore[union-attr]
        at_once = "restart" if before and not asked else "startup"
        has_queue = is_queued and attempt.job not in self._local
        self.spend("queue" if has_queue else at_once, attempt.start)

    def attempt(self, attempt: _Attempt, until: float | None, is_last: bool) -> None:
        """Book the time of an attempt; `until` is the next one's start, or now if it is live."""
        limit = attempt.end or until or float("inf")
        events = [each for each in self._events if attempt.start <= each["time"] <= limit]
        lines = [each for each in self._lines if attempt.start <= each.time <= limit]
        signs = [each.time for each in lines] + [each["time"] for each in events]
        end = attempt.end
        if end is None:  # it is live, or has vanished
            end = until if is_last and until else max(signs, default=attempt.start)
        first = [each for each in events if each["event"] == "first_step"]
        if not first:
            is_training = any(each["event"] == "started" for each in events)
            failed = "lost" if attempt.has_failed and (not is_last or until is None) else "startup"
            self.spend(failed if is_training or attempt.has_failed else "other", end)
            return
        self.spend("startup", first[0]["time"])
        self.step = int(first[0]["step"]) - 1
        self._did(int(first[0]["step"]), 0.0)
        has_ended = False
        for at, mark in _marks(lines, events, first[0]["time"]):
            has_ended |= isinstance(mark, dict) and mark["event"] in ENDS
            self._book(at, mark, events)
        is_live = is_last and attempt.end is None and until is not None
        self.spend("other" if has_ended else "productive" if is_live else "lost", end)

    def _book(self, at: float, mark: LoggedStep | dict[str, Any], events: Sequence[Any]) -> None:
        """Book the time until a line or an event that says how many steps were done."""
        since, parts = self._now, dict[str, float]()
        for event in events:
            if event["event"] == "evaluated" and since < event["time"] <= at:
                parts["evaluation"] = parts.get("evaluation", 0.0) + event.get("seconds", 0.0)
            if event["event"] == "checkpointed":
                took = event.get("seconds", 0.0)
                is_waited_for = isinstance(mark, dict) and mark["event"] == "finished"
                held, when = event.get("stall", 0.0), event["time"] - took
                if is_waited_for and since < event["time"] <= at:
                    held, when = took, event["time"]
                if since < when <= at:
                    parts["checkpoint"] = parts.get("checkpoint", 0.0) + held
        if isinstance(mark, LoggedStep):
            parts["data wait"] = mark.data_wait * (at - since)
            self._did(mark.step, self.spend("productive", at, parts))
        elif mark["event"] == "rolled_back":
            self.spend("lost", at)
            self.step = int(mark["step"])
        elif int(mark["step"]) > self.step:
            self._did(int(mark["step"]), self.spend("productive", at, parts))
        else:
            has_ended = mark["event"] in ENDS
            rest = self.spend("other" if has_ended else "productive", at, parts)
            if not has_ended:
                self._did(self.step, rest)

    def _did(self, step: int, seconds: float) -> None:
        """Note that the steps up to this one took these seconds, which are booked as productive."""
        step = max(step, self.step)
        steps, again = step - self.step, max(0, min(step, self._most) - self.step)
        share = again / steps if steps else float(step < self._most)
        self.seconds["productive"] -= seconds * share
        self.seconds["repeated"] += seconds * share
        self.again += again
        self._counted.append((self.step, step, seconds * (1 - share)))
        self.step, self._most = step, max(step, self._most)

    def take_back(self, reached: int) -> None:
        """Book steps after this one, which are not part of the run's state, as lost."""
        for first, last, seconds in self._counted:
            if last > reached and last > first:
                lost = seconds * (last - max(first, reached)) / (last - first)
                self.seconds["productive"] -= lost
                self.seconds["lost"] += lost


def _marks(
    lines: Sequence[LoggedStep], events: Sequence[dict[str, Any]], since: float
) -> Iterator[tuple[float, LoggedStep | dict[str, Any]]]:
    """Yield what says how many steps were done when, in order."""
    named = (*ENDS, "evaluated", "rolled_back")
    chosen = [each for each in events if each["event"] in named and isinstance(each["step"], int)]
    both: list[tuple[float, LoggedStep | dict[str, Any]]] = [(each.time, each) for each in lines]
    both += [(each["time"], each) for each in chosen]
    yield from sorted((each for each in both if each[0] > since), key=lambda each: each[0])
