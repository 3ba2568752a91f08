"""The best checkpoint of a run. No torch."""

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.config import ConfigError
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Damaged, Manifest

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World

MINIMIZED = re.compile(r"(?:loss|error|perplexity|mae|mse|rmse)$")
"""Names of metrics that are better when they are smaller."""


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
        if (score := self.score(facts.get("metrics", {}))) is not None:
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
        if (score := Best(metric).score(stored.about("metrics"))) is not None:
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
