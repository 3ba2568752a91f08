"""When is a save due, and which checkpoint is the best? No torch."""

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
    from rollcall.train.dist.world import World

FIRST = 60.0
"""Seconds until the first save of `checkpoint.auto_interval`, whose cost is not known before."""
MAX_SHARE = 0.1
"""The largest fraction of the time for which `checkpoint.auto_interval` has a save in flight, since
that slows the steps down."""


SMALL = re.compile(r"(?:loss|error|perplexity|mae|mse|rmse)$")
"""Names of metrics that are best when they are small."""


class Cadence:
    """Decides when a save is due: by steps, by the clock, or at once."""

    def __init__(self, options: Checkpoint) -> None:
        self._every = options.every
        self._interval = 60 * (options.every_minutes or math.inf)
        self._auto = options.auto_interval
        self._assumed = self._mean_to_failure = options.mtbf_hours * 3600
        self._began = time.monotonic()
        self._due = False

    def start(self, events: Iterable[dict[str, Any]]) -> None:
        """Set the first interval of `auto_interval` from a run's events; only rank 0 needs it."""
        if self._auto:
            lines = list(events)
            starts = [index for index, line in enumerate(lines) if line["event"] == "started"]
            # The last start is this attempt's, which has not failed.
            past = lines[: starts[-1]] if starts else []
            self._mean_to_failure = between_failures(past, self._assumed)
            self._interval = FIRST

    def clock_is_up(self) -> bool:
        """Whether the clock of this rank makes a save due that is not due already."""
        return not self._due and time.monotonic() - self._began > self._interval

    def request(self) -> None:
        """Make a save due at the next opportunity."""
        self._due = True

    def is_due(self, step: int) -> bool:
        """Whether a save is due after this step."""
        self._due = self._due or bool(self._every and step % self._every == 0)
        return self._due

    def begin(self) -> None:
        """Note that a save begins."""
        self._due = False
        self._began = time.monotonic()

    def adapt(self, stall: float, seconds: float) -> None:
        """Choose the next interval of `auto_interval` from the seconds that a save took."""
        if self._auto:
            self._interval = max(seconds / MAX_SHARE, best_interval(stall, self._mean_to_failure))


class Best:
    """Finds the checkpoint with the best validation metric, as `ranked` reads it."""

    def __init__(self, metric: str | None) -> None:
        self.step: int | None = None  # of the best checkpoint
        self._metric, self._sign = ranked(metric) if metric else ("", 1)
        self._newest: tuple[int, dict[str, float]] = (-1, {})
        self._saved: dict[int, float] = {}  # scores of the checkpoints; more is better
        self._saving: dict[int, float] = {}  # scores of what is being saved

    def recall(self, directory: Path, world: "World") -> None:
        """Read the scores of earlier checkpoints from their manifests, on rank 0 for all ranks."""
        if not self._metric:
            return
        found = _intact(directory) if world.is_main else ()
        known = world.broadcast([(one.step, self.score(one.about("metrics"))) for one, _ in found])
        self._saved = {step: score for step, score in known if score is not None}
        self._choose()

    def evaluated(self, step: int, metrics: dict[str, float]) -> bool:
        """Note the metrics of the newest evaluation; return whether they are the best so far."""
        self._newest = step, metrics
        score = self.score(metrics)
        return score is not None and score > max(self._saved.values(), default=-math.inf)

    def begin(self, step: int) -> dict[str, Any]:
        """Note that a save begins; return its metrics as facts, if this step was evaluated."""
        evaluated, metrics = self._newest
        if step != evaluated:
            return {}
        score = self.score(metrics)
        if score is not None:
            self._saving[step] = score
        return {"metrics": metrics}

    def is_candidate(self, step: int) -> bool:
        """Whether the save of this step, not yet on shared storage, may become the best."""
        return step in self._saving

    def end(self, step: int, is_saved: bool) -> None:
        """Note that a save to shared storage has ended."""
        score = self._saving.pop(step, None)
        if is_saved and score is not None:
            self._saved[step] = score
            self._choose()

    def _choose(self) -> None:
        self.step = max(self._saved, key=self._saved.__getitem__, default=None)

    def score(self, metrics: dict[str, float]) -> float | None:
        """Return the chosen metric such that more is better; None if it is not a number."""
        value = metrics.get(self._metric) if self._metric else None
        if not isinstance(value, float) or not math.isfinite(value):
            return None
        return value * self._sign


def ranked(metric: str) -> tuple[str, int]:
    """Return the name of a metric, and 1 if more of it is better, else -1: `loss`, `f1:max`."""
    name, _, direction = metric.partition(":")
    is_small = SMALL.search(name) is not None if not direction else direction == "min"
    return name, -1 if is_small else 1


def best(directory: Path) -> Path:
    """Return the checkpoint with the best validation: by `checkpoint.keep_best`, or by its loss.

    Raise ConfigError if no checkpoint was evaluated.
    """
    scores = []
    for stored, path in _intact(directory):
        metric = str(stored.about("config", "checkpoint").get("keep_best") or "loss")
        score = Best(metric).score(stored.about("metrics"))
        scores += [] if score is None else [(score, stored.step, path)]
    if not scores:
        raise ConfigError(
            f"{directory}: no checkpoint has a validation. Set train.evaluate_every and "
            "checkpoint.keep_best=loss, or leave out --best to take the newest"
        )
    return max(scores)[-1]


def _intact(directory: Path) -> Iterator[tuple[Manifest, Path]]:
    for path in layout.published(directory).values():
        with contextlib.suppress(Damaged, ConfigError):
            yield manifest.read(path), path


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
    """Return the mean seconds between failures of a run: the assumption, corrected by experience.

    The assumed seconds count as one failure. An attempt that did not finish has failed; its last
    event shows how long it ran.
    """
    attempts: list[list[dict[str, Any]]] = []
    for line in events:
        if line["event"] == "started":
            attempts.append([])
        if attempts:
            attempts[-1].append(line)
    # The clock may have been set back.
    seconds: float = sum(max(0.0, lines[-1]["time"] - lines[0]["time"]) for lines in attempts)
    failures = sum("finished" not in (line["event"] for line in lines) for lines in attempts)
    return (assumed + seconds) / (1 + failures)
