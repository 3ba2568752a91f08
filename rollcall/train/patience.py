"""Early stopping: has a validation metric stopped improving?"""

import math

from rollcall.config import ConfigError
from rollcall.train.checkpoint.scores import ranked
from rollcall.train.ranks.run import Run


class Patience:
    """Counts evaluations without an improvement; all ranks make each call together."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._most = run.config.train.stop_after
        self._name, self._sign = ranked(run.config.train.stop_metric)
        self._scores: dict[int, float] = {}  # by step; more is better

    @property
    def reason(self) -> str:
        """The reason to stop the run early, or an empty text."""
        scores = [self._scores[step] for step in sorted(self._scores)]
        if self._most is None or not scores:
            return ""
        since = len(scores) - 1 - scores.index(max(scores))
        if since < self._most:
            return ""
        return f"{self._name} has not improved in {since} evaluations"

    def recall(self, step: int) -> None:
        """Read the evaluations up to this step, which earlier attempts recorded."""
        world, found = self._run.world, {}
        if self._most and world.is_main:
            for event in self._run.run_dir.read_events("evaluated"):
                value = event.get(self._name)
                if isinstance(value, int | float) and event.get("step", math.inf) <= step:
                    found[event["step"]] = self._score(value)
        self._scores = dict(world.broadcast([*found.items()]))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Note an evaluation; raise ConfigError if it has no metric that the run watches."""
        train, best = self._run.config.train, self._run.config.checkpoint.keep_best
        for key, metric in (
            ("train.stop_metric", train.stop_metric if self._most else None),
            ("checkpoint.keep_best", best),
        ):
            if metric and ranked(metric)[0] not in figures:
                raise ConfigError(
                    f"{key}={metric}: the evaluation has no such figure; it has "
                    f"{', '.join(figures)}"
                )
        if self._most:
            self._scores[step] = self._score(figures[self._name])

    def _score(self, value: float) -> float:
        return -math.inf if math.isnan(value) else self._sign * value  # NaN is the worst
