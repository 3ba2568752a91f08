"""When is the state of a run saved, and what is told of it?"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from train.checkpoint import interval, manifest, shelf
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.flight import Outcome
from train.config import Config
from train.run import RunDir, read_lines
from train.world import World

State = dict[str, Any]
PATIENCE = 60.0  # seconds for which a due save waits for the one before it
LAST = 600.0  # and for which the end of a run waits for the last one
FIRST = 60.0  # seconds until the first save of `auto`, which has nothing to reckon with before
# A save that is in flight costs steps too: `auto` spends at most a tenth of the time in saves.
SHARE = 0.1


class Saver:
    """Saves when it is due; every rank makes each call together.

    Attributes:
        checkpoints: what saves and loads.
        problem: why the newest save failed, or nothing.
        seconds: how long it took.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        run_dir: RunDir,
        make_state: Callable[[], State],
    ) -> None:
        """Find out how often to save.

        Args:
            make_state: the state of the run, for saving or for loading into.
        """
        self._config = config
        self._options = config.checkpoint
        self._world = world
        self._run_dir = run_dir
        self._make_state = make_state
        keep, forever = self._options.keep, self._options.forever
        self.checkpoints = Checkpointer(run_dir.checkpoints, world, keep, forever)
        self.checkpoints.on_refusal = self._refused
        self.checkpoints.before_publishing = run_dir.check_claim
        self.problem = ""
        self.seconds = 0.0
        self._saved_at: int | None = None
        self._failures: dict[int, str] = {}
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._worth: dict[int, float] = {}  # of the checkpoints that are there, more is better
        self._due = self._slow = False
        self._begun = time.monotonic()
        self._interval = 60 * (self._options.minutes or math.inf)
        self._between_failures = 0.0

    def resume(self) -> tuple[int, State] | None:
        """The newest whole checkpoint: its step and the state; None where nothing was saved.

        Raises:
            ConfigError: what there is cannot be used.
        """
        if self._options.auto and self._world.is_main:
            self._between_failures = self._reckon_failures()
            self._interval = FIRST
        self.checkpoints.clean()
        found = self.checkpoints.restore(self._make_state)
        if found:
            self._saved_at = found[0]
        if self._options.best:
            self._find_best()
        self.checkpoints.retire()
        return found

    def flags(self) -> list[bool]:
        """What the ranks must know of this one: the save in flight, and rank 0's clock."""
        late = time.monotonic() - self._begun > self._interval
        clock = self._world.is_main and late and not self._due and not self.checkpoints.busy
        return [*self.checkpoints.signals(), clock]

    def settle(self, sums: Sequence[float]) -> None:
        """Act on the sums of all ranks' flags."""
        *signals, clock = sums
        self._due = self._due or clock > 0
        self._ended(self.checkpoints.settle(signals))

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Note what the model is worth; the best one so far is saved."""
        self._evaluated = step, metrics
        worth = self._worth_of(self._evaluated[1])
        if worth is not None and worth > max(self._worth.values(), default=-math.inf):
            self._due = True

    def is_due(self, step: int) -> bool:
        """Whether it is time for a save, by steps, by the clock or by what was evaluated."""
        every = self._options.every
        self._due = self._due or bool(every and step % every == 0)
        return self._due and step != self._saved_at

    def begin(self, step: int, **facts: Any) -> None:
        """Begin a save; one that is in flight is waited for, but for a slow one not every time.

        Args:
            facts: further plain values for the manifest.
        """
        if self.checkpoints.busy and not self._slow:
            self._ended(self.checkpoints.wait(PATIENCE))
            self._slow = self.checkpoints.busy
            if self._slow:
                text = f"step {step} is not saved yet: the save before it is still being written"
                self._tell("save_delayed", text, step=step)
        if not self.checkpoints.busy:
            self._begin(step, facts)

    def finish(self, step: int, **facts: Any) -> None:
        """Begin the last save, unless the state is saved; `close` waits for it."""
        self._ended(self.checkpoints.drain(LAST))
        if self._saved_at != step:
            self._begin(step, facts)

    def close(self, seconds: float = LAST) -> None:
        """Wait for the save in flight.

        Args:
            seconds: give it up after so many.
        """
        self._ended(self.checkpoints.drain(seconds))

    def summary(self) -> dict[str, str]:
        """Rows for the summary of the run."""
        if not self._failures:
            return {}
        last = max(self._failures)
        text = f"{len(self._failures)}; the last at step {last}: {self._failures[last]}"
        return {"saves that failed": text}

    def _begin(self, step: int, facts: dict[str, Any]) -> None:
        self._due = False
        self._begun = time.monotonic()
        facts |= {
            "samples": step * self._config.data.global_batch,
            "mesh": self._config.parallel.mesh_text,
            "config": self._config.model_dump(),
        }
        if step == self._evaluated[0]:
            facts["metrics"] = self._evaluated[1]
        self.checkpoints.begin(step, self._make_state(), **facts)

    def _ended(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self._slow = False
        step, self.problem = outcome.step, ""
        self.seconds = outcome.seconds
        if outcome.problem:
            self._failures[step] = outcome.problem
            self.problem = f"step {step} was not saved: {outcome.problem}"
            self._tell("save_failed", self.problem, step=step, reason=outcome.problem)
            return
        self._saved_at = step
        worth = self._worth_of(self._evaluated[1]) if step == self._evaluated[0] else None
        if worth is not None:
            self._worth[step] = worth
            self.checkpoints.best = max(self._worth, key=self._worth.__getitem__)
        if self._options.auto and self._world.is_main:
            least = outcome.seconds / SHARE
            self._interval = max(least, interval.best(outcome.stall, self._between_failures))
        if self._world.is_main:
            stall, seconds = round(outcome.stall, 4), round(outcome.seconds, 3)
            self._run_dir.record("checkpointed", step=step, seconds=seconds, stall=stall)

    def _refused(self, step: int, problem: str) -> None:
        path = shelf.place(self._run_dir.checkpoints, step)
        text = f"{path} is damaged and was set aside: {problem}"
        self._tell("refused", text, step=step, reason=problem)

    def _tell(self, event: str, text: str, **fields: object) -> None:
        if self._world.is_main:
            print(f"rollcall: {text}", flush=True)
            self._run_dir.record(event, **fields)

    def _reckon_failures(self) -> float:
        # The last `started` is that of this attempt, which has not failed.
        events = list(read_lines(self._run_dir.events))
        starts = [place for place, line in enumerate(events) if line["event"] == "started"]
        past = events[: starts[-1]] if starts else []
        return interval.between_failures(past, self._options.failure_hours * 3600)

    def _worth_of(self, metrics: dict[str, float]) -> float | None:
        """How good by the chosen metric, if one was chosen and is a number."""
        best = self._options.best
        if best is None or not math.isfinite(metrics.get(best, math.nan)):
            return None
        return -metrics[best] if best == "loss" else metrics[best]

    def _find_best(self) -> None:
        """Read again what the checkpoints were worth when they were saved."""
        worth: list[tuple[int, float | None]] = []
        if self._world.is_main:
            for step, path in shelf.published(self._run_dir.checkpoints).items():
                with contextlib.suppress(manifest.Damaged):
                    metrics = manifest.read(path).facts.get("metrics")
                    worth.append((step, self._worth_of(metrics) if metrics else None))
        known = json.loads(self._world.broadcast_text(json.dumps(worth)))
        self._worth = {step: value for step, value in known if value is not None}
        self.checkpoints.best = max(self._worth, key=self._worth.__getitem__, default=None)
