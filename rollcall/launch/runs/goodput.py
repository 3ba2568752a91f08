"""Account for the time of a run, over all its attempts and jobs, from its records alone.

Goodput is the share of the time from the submission to the end in which steps were done that count:
https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from typing import Any

from rollcall.launch.runs import find, restarts
from rollcall.launch.runs.reasons import SHARES as SHARES
from rollcall.launch.runs.states import Condition
from rollcall.records.attempt import AttemptRecord
from rollcall.records.job import Restart, Submission
from rollcall.records.run import INTEGER_LIMIT, ForgottenStep, LoggedStep
from rollcall.records.run_dir import RunDir

LOGGED = "logged"
"""The name of a line of metrics.jsonl among the events."""
ENDS = ("signalled", "finished")
HELD_UP = ("evaluated", "checkpointed")
CUTS = (LOGGED, "evaluated", "rolled_back", *ENDS)
"""Events that say how many steps were done until then."""


@dataclass(frozen=True)
class Goodput:
    """The time of a run, by its use."""

    wall: float  # seconds from the submission or the first start to the end, or to now
    shares: dict[str, float]  # seconds by the names of SHARES; they add up to `wall`
    attempts: int
    repeated_steps: int  # how many steps were lost and had to be done again
    is_live: bool

    @property
    def productive(self) -> float:
        """The goodput, from 0 to 1."""
        return self.shares["productive"] / self.wall if self.wall else 0.0


def goodput(run: RunDir, condition: Condition) -> Goodput | None:
    """Account for the time of a run; None if it has never started.

    Times are by the clocks of the nodes that wrote the records. Steps are known as far as they
    were logged: the time between the last line of metrics.jsonl and a fault counts as lost.
    """
    events = run.read_events()
    attempts = _attempts(run, events)
    if not attempts:
        return None
    newest = attempts[-1]
    book = _Book(run, events, attempts[0].started)
    nexts = [*(attempt.started for attempt in attempts[1:]), inf]
    for before, attempt, later in zip([None, *attempts], attempts, nexts, strict=False):
        is_running = condition.is_live and attempt is newest and attempt.ended is None
        book.wait(attempt, before)
        book.attempt(attempt, later, is_running)
    if condition.is_live and newest.ended is not None:
        book.spend("queue" if condition.state == "pending" else "restart", time.time())
    is_lost = not condition.is_live and _has_failed(newest)
    book.take_back(min(book.step, restarts.saved_step(run)) if is_lost else book.step)
    wall = sum(book.seconds.values())
    again = sum(back.reached - back.step for back in restarts.rollbacks(run))
    return Goodput(wall, book.seconds, len(attempts), again, condition.is_live)


def _attempts(run: RunDir, events: Sequence[dict[str, Any]]) -> list[AttemptRecord]:
    launched = find.attempts(run)
    by_hand: list[AttemptRecord] = []
    for event in events:
        at, what = event["time"], event["event"]
        if any(attempt.started <= at <= (attempt.ended or inf) for attempt in launched):
            continue
        if what == "started":
            by_hand.append(AttemptRecord(0, "", [], 0, at))
        elif by_hand and what in ("finished", "failed"):
            by_hand[-1] = replace(by_hand[-1], state=what, ended=at)
    return sorted([*launched, *by_hand], key=lambda attempt: attempt.started)


def _has_failed(attempt: AttemptRecord) -> bool:
    return attempt.state in (None, "failed")


class _Book:
    """Books every second since the beginning exactly once."""

    def __init__(self, run: RunDir, events: Sequence[dict[str, Any]], first: float) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self.step = 0  # the newest
        self._most = 0  # the newest step of all attempts
        self._counted: list[tuple[int, int, float]] = []  # steps from, to, productive seconds
        lines = [*LoggedStep.read(run.path), *ForgottenStep.read(run.path)]
        logged = {(line.time, line.step): {**vars(line), "event": LOGGED} for line in lines}
        self._signs = sorted([*events, *logged.values()], key=itemgetter("time"))
        self._restarts = Restart.read(run.path)
        self._submitted = [submission.time for submission in Submission.read(run.path)]
        self._local = {job.id for job in find.jobs(run) if job.is_local}
        self._now = min([first, *self._submitted])

    def spend(self, name: str, until: float, parts: Mapping[str, float] | None = None) -> float:
        """Book the time until then, first the parts as far as they fit; return what `name` gets."""
        left = max(0.0, until - self._now)
        for part, seconds in (parts or {}).items():
            taken = min(left, max(0.0, seconds))
            self.seconds[part] += taken
            left -= taken
        self.seconds[name] += left
        self._now = max(self._now, until)
        return left

    def wait(self, attempt: AttemptRecord, before: AttemptRecord | None) -> None:
        """Book the time before an attempt."""
        asked = [at for at in self._submitted if self._now <= at <= attempt.started]
        noted = [line for line in self._restarts if self._now <= line.time <= attempt.started]
        is_new = before is None or bool(asked)
        if before and before.ended is None and noted:
            self.spend("lost", noted[0].time)
        if before and asked:
            self.spend("restart", asked[0])
        # What starts again within its job says so; Slurm itself does not.
        was_queued = noted[-1].is_queued if noted else bool(before and before.job == attempt.job)
        has_queue = bool(attempt.job) and attempt.job not in self._local
        name = "startup" if is_new else "restart"
        self.spend("queue" if has_queue and (is_new or was_queued) else name, attempt.started)

    def attempt(self, attempt: AttemptRecord, later: float, is_running: bool) -> None:
        """Book the time of an attempt; `later` is when the next one starts."""
        limit = attempt.ended or later
        signs = [sign for sign in self._signs if attempt.started <= sign["time"] <= limit]
        last = signs[-1]["time"] if signs else attempt.started
        end = attempt.ended or (time.time() if is_running else last)
        # A program of the user has no event of its first step.
        names = ("first_step", LOGGED)
        starts = [sign for name in names for sign in signs if sign["event"] == name]
        if not starts:
            is_lost = _has_failed(attempt) and not is_running
            is_program = not signs and not _has_failed(attempt)
            self.spend("lost" if is_lost else "other" if is_program else "startup", end)
            return
        first = starts[0]["time"]
        self.spend("startup", first)
        self.step = int(_number(starts[0], "step")) - 1
        self._did(self.step + 1, 0.0)
        self._costs = deque(sorted(_cost(sign) for sign in signs if sign["event"] in HELD_UP))
        for sign in signs:
            if sign["time"] > first and sign["event"] in CUTS:
                self._book(sign)
        has_ended = any(sign["event"] in ENDS for sign in signs) or not _has_failed(attempt)
        self.spend("other" if has_ended else "productive" if is_running else "lost", end)

    def _book(self, sign: Mapping[str, Any]) -> None:
        """Book the time until a sign, which says how many steps were done."""
        name, at, since = sign["event"], sign["time"], self._now
        held = dict.fromkeys(("evaluation", "checkpoint", "data wait"), 0.0)
        while self._costs and self._costs[0][0] <= at:
            when, share, seconds = self._costs.popleft()
            held[share] += seconds if when > since else 0.0
        if name == "finished":  # the last saves were waited for
            saves = [save for save in self._signs if save["event"] == "checkpointed"]
            ended = [save for save in saves if since < save["time"] <= at]
            held["checkpoint"] = sum(_number(save, "seconds") for save in ended)
        step = int(_number(sign, "step"))
        if name == LOGGED:
            held["data wait"] = _number(sign, "data_wait") * (at - since)
        if name == "rolled_back":
            self.spend("lost", at)
            self.step = step
        elif name in ENDS and step <= self.step:
            self.spend("other", at, held)
        else:
            self._did(step, self.spend("productive", at, held))

    def _did(self, step: int, seconds: float) -> None:
        """Note that the steps up to this one took these seconds, which are booked as productive."""
        step = max(step, self.step)
        steps, repeated = step - self.step, max(0, min(step, self._most) - self.step)
        share = repeated / steps if steps else float(step < self._most)
        self.seconds["productive"] -= seconds * share
        self.seconds["repeated"] += seconds * share
        self._counted.append((self.step, step, seconds * (1 - share)))
        self.step, self._most = step, max(step, self._most)

    def take_back(self, reached: int) -> None:
        """Book steps after this one, which are not part of the run's state, as lost."""
        for first, last, seconds in self._counted:
            if last > max(first, reached):
                lost = seconds * (last - max(first, reached)) / (last - first)
                self.seconds["productive"] -= lost
                self.seconds["lost"] += lost


def _cost(event: Mapping[str, Any]) -> tuple[float, str, float]:
    """Return when an evaluation or a save held up the training, its share, and for how long."""
    seconds, at = _number(event, "seconds"), event["time"]
    if event["event"] == "evaluated":
        return at, "evaluation", seconds
    return at - seconds, "checkpoint", _number(event, "stall")


def _number(event: Mapping[str, Any], name: str) -> float:
    """Return a number of an event; 0 if it has none, as in a run of an earlier version."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < INTEGER_LIMIT else 0.0
