"""The time of the next save, and the best checkpoint. No torch."""

import contextlib
import math
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.config import ConfigError
from rollcall.config.schema import Checkpoint
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Damaged, Manifest

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World

FIRST_INTERVAL = 60.0
"""Seconds until the first save of `checkpoint.auto_interval`, which shows what a save costs."""
MAX_SHARE = 0.1
"""The largest fraction of the time for which `checkpoint.auto_interval` has a save in flight, since
that slows the steps down."""
MINIMIZED = re.compile(r"(?:loss|error|perplexity|mae|mse|rmse)$")
"""Names of metrics that are better when they are smaller."""


class Cadence:
    """Decides when a save is due: by steps, by the clock, or at once."""

    def __init__(self, options: Checkpoint) -> None:
        self._every = options.every
        self._interval = 60 * (options.every_minutes or math.inf)
        self._auto = options.auto_interval
        self._assumed_mtbf = self._mtbf = options.mtbf_hours * 3600  # seconds between failures
        self._began = time.monotonic()
        self._due = False

    def start(self, events: Iterable[dict[str, Any]]) -> None:
        """Set the first interval of `auto_interval` from a run's events; only rank 0 needs it."""
        if self._auto:
            lines = list(events)
            starts = [index for index, line in enumerate(lines) if line["event"] == "started"]
            # The last start is this attempt's, which has not failed.
            past = lines[: starts[-1]] if starts else []
            self._mtbf = between_failures(past, self._assumed_mtbf)
            self._interval = FIRST_INTERVAL

    def clock_is_up(self) -> bool:
        """Return True if this rank's clock makes a save due that is not due already."""
        return not self._due and self.seconds > self._interval

    @property
    def seconds(self) -> float:
        """Seconds since the newest save began, or since the start."""
        return time.monotonic() - self._began

    def request(self) -> None:
        """Make a save due at the next opportunity."""
        self._due = True

    def is_due(self, step: int) -> bool:
        """Return True if a save is due after this step."""
        self._due = self._due or bool(self._every and step % self._every == 0)
        return self._due

    def begin(self) -> None:
        """Note that a save begins."""
        self._due = False
        self._began = time.monotonic()

    def adapt(self, stall: float, seconds: float) -> None:
        """Choose the next interval of `auto_interval` after a save; `stall` is a part of it."""
        if self._auto:
            self._interval = max(seconds / MAX_SHARE, best_interval(stall, self._mtbf))


class Best:
    """Finds the checkpoint with the best validation metric, as `ranked` reads it."""

    def __init__(self, metric: str | None) -> None:
        self._metric, self._sign = ranked(metric) if metric else ("", 1)
        self._newest: tuple[int, dict[str, float]] = (-1, {})
        self._saved: dict[int, float] = {}  # scores of the checkpoints; more is better

    def recall(self, directory: Path, world: "World") -> None:
        """Read the scores of earlier checkpoints from their manifests, on rank 0 for all ranks."""
        if not self._metric:
            return
        manifests = _intact(directory) if world.is_main else ()
        scores = [(stored.step, self.score(stored.about("metrics"))) for stored in manifests]
        self._saved = {step: s for step, s in world.broadcast(scores) if s is not None}

    @property
    def step(self) -> int | None:
        """The step of the best checkpoint; None if no checkpoint has a score."""
        return max(self._saved, key=self._saved.__getitem__, default=None)

    def evaluated(self, step: int, metrics: dict[str, float]) -> bool:
        """Note the metrics of the newest evaluation; return whether they are the best so far."""
        self._newest = step, metrics
        score = self.score(metrics)
        return score is not None and score > max(self._saved.values(), default=-math.inf)

    def facts(self, step: int) -> dict[str, Any]:
        """Return the metrics for the checkpoint of this step, if it was evaluated."""
        evaluated, metrics = self._newest
        return {"metrics": metrics} if step == evaluated else {}

    def saved(self, step: int, facts: dict[str, Any]) -> None:
        """Note a checkpoint with these facts on shared storage."""
        score = self.score(facts.get("metrics", {}))
        if score is not None:
            self._saved[step] = score

    def score(self, metrics: dict[str, float]) -> float | None:
        """Return the chosen metric, signed so that more is better; None if it is not a number."""
        value = metrics.get(self._metric) if self._metric else None
        if not isinstance(value, float) or not math.isfinite(value):
            return None
        return value * self._sign


def ranked(metric: str) -> tuple[str, int]:
    """Split `loss` or `f1:max` into the metric's name and 1 if more is better, else -1."""
    name, _, direction = metric.partition(":")
    is_minimized = direction == "min" if direction else MINIMIZED.search(name) is not None
    return name, -1 if is_minimized else 1


def best(directory: Path) -> int:
    """Return the step with the best `checkpoint.keep_best`, or loss; ConfigError without one."""
    scores = []
    for stored in _intact(directory):
        metric = str(stored.about("config", "checkpoint").get("keep_best") or "loss")
        score = Best(metric).score(stored.about("metrics"))
        if score is not None:
            scores.append((score, stored.step))
    if not scores:
        raise ConfigError(
            f"{directory}: no checkpoint has a validation. Set train.evaluate_every and "
            "checkpoint.keep_best=loss, or leave out --best to take the newest"
        )
    return max(scores)[-1]


def _intact(directory: Path) -> Iterator[Manifest]:
    for path in layout.published(directory).values():
        with contextlib.suppress(Damaged, ConfigError):
            yield manifest.read(path)


def best_interval(cost: float, between_failures: float) -> float:
    """Return the seconds between saves that lose the least time to saving and to repeated steps.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    https://doi.org/10.1016/j.future.2004.11.016 (equation 37). Its first term is the formula of
    J. W. Young, https://doi.org/10.1145/361147.361115. Both arguments are in seconds.
    """
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    first = math.sqrt(2 * cost * between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def between_failures(events: Iterable[dict[str, Any]], assumed: float) -> float:
    """Return the mean seconds between a run's failures; the assumed seconds count as one failure.

    An attempt that did not finish has failed; its last event shows how long it ran.
    """
    attempts: list[list[dict[str, Any]]] = []
    for line in events:
        if line["event"] == "started":
            attempts.append([])
        if attempts:
            attempts[-1].append(line)
    # The clock may have been set back.
    seconds: float = sum(max(0.0, lines[-1]["time"] - lines[0]["time"]) for lines in attempts)
    failures = sum(all(line["event"] != "finished" for line in lines) for lines in attempts)
    return (assumed + seconds) / (1 + failures)
