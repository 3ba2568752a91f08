"""When is the state of a run saved, and what is told of it?"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from train.checkpoint import interval, manifest, shelf
from train.checkpoint.checkpointer import Checkpointer, restore
from train.checkpoint.flight import Outcome
from train.checkpoint.local import Local, open_local
from train.config import Config, ConfigError
from train.deadline import Deadline
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

    With `checkpoint.local` a save goes to the nodes' own disks, and from there to shared storage,
    as long as they work. The last one of an attempt ends on shared storage in any case.

    Attributes:
        checkpoints: what saves and loads on shared storage.
        problem: why the newest save failed there, or nothing.
        seconds: how long it took.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        run_dir: RunDir,
        make_state: Callable[[], State],
        deadline: Deadline,
    ) -> None:
        """Find out how often to save.

        Args:
            make_state: the state of the run, for saving or for loading into.
            deadline: when the job ends; nothing is waited for until then.
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
        self.checkpoints.is_late = deadline.is_late
        self._deadline = deadline
        self._local: Local | None = None
        self._local_at: int | None = None
        self._local_trouble = ""  # why saves do not go to the nodes' disks, though they were to
        self.problem = ""
        self.seconds = 0.0
        self._saved_at: int | None = None
        self._failures: dict[int, str] = {}
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._worth: dict[int, float] = {}  # of the checkpoints that are there, more is better
        self._worth_to_be: dict[int, float] = {}  # of those that are being saved
        self._due = self._slow = False
        self._begun = time.monotonic()
        self._interval = 60 * (self._options.minutes or math.inf)
        self._between_failures = 0.0

    def open(self) -> bool:
        """Find what was saved, and the nodes' disks where they are used.

        Returns:
            Whether there is anything that the run might go on from.

        Raises:
            ConfigError: `checkpoint.local` cannot be what is meant.
        """
        if self._options.local:
            options = self._options.local, self._run_dir, self._world, self.checkpoints
            try:
                self._local = open_local(*options)
            except OSError as error:
                self._leave_local(self.checkpoints.newest() or 0, str(error))
            else:
                self._local.on_refusal = self._refused_locally
                self._local.before_publishing = self.checkpoints.before_publishing
                self._local.is_late = self.checkpoints.is_late
        return any(each.newest() is not None for each in self._shelves)

    def resume(self) -> tuple[int, State] | None:
        """The newest whole checkpoint: its step and the state; None where nothing was saved.

        Raises:
            ConfigError: what there is cannot be used.
        """
        if self._options.auto and self._world.is_main:
            self._between_failures = self._reckon_failures()
            self._interval = FIRST
        for each in self._shelves:
            each.clean()
        found = restore(self._shelves, self._make_state)
        step = found[0] if found else 0
        self._saved_at = step if found and found[2] is self.checkpoints else None
        self._local_at = step if found and found[2] is self._local else None
        if self._options.best:
            self._find_best()
        if self._local:
            self._local.forget_after(step)
        for each in self._shelves:
            each.retire()
        return found and found[:2]

    def flags(self) -> list[bool]:
        """What the ranks must know of this one: the save in flight, and rank 0's clock."""
        late = time.monotonic() - self._begun > self._interval
        clock = self._world.is_main and late and not self._due and not self._first.busy
        local = self._local.signals() if self._local else []
        return [*self.checkpoints.signals(), *local, clock]

    def settle(self, sums: Sequence[float]) -> None:
        """Act on the sums of all ranks' flags."""
        *signals, clock = sums
        self._due = self._due or clock > 0
        self._ended(self.checkpoints.settle(signals[:3]))
        if self._local:
            self._ended_locally(self._local.settle(signals[3:]))

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
        return self._due and step not in (self._saved_at, self._local_at)

    def begin(self, step: int, **facts: Any) -> None:
        """Begin a save; one that is in flight is waited for, but for a slow one not every time.

        Args:
            facts: further plain values for the manifest.
        """
        if self._first.busy and not self._slow:
            if self._first is self._local:
                self._ended_locally(self._local.wait(PATIENCE))
            else:
                self._ended(self.checkpoints.wait(PATIENCE))
            self._slow = self._first.busy
            if self._slow:
                text = f"step {step} is not saved yet: the save before it is still being written"
                self._tell("save_delayed", text, step=step)
        if not self._first.busy:
            self._begin(self._first, step, facts)

    def finish(self, step: int, **facts: Any) -> None:
        """Begin the last save, to shared storage unless it is there; `close` waits for it."""
        self._deadline.begin_last_save()
        self.close()
        if self._saved_at != step:
            self._begin(self.checkpoints, step, facts)

    def close(self, seconds: float = LAST) -> None:
        """Wait for what is in flight, until it is on shared storage or the job is about to end.

        Args:
            seconds: give it up after so many.
        """
        end = time.monotonic() + seconds
        if self._local:
            self._ended_locally(self._local.drain(seconds))
        while self.checkpoints.busy:
            self._ended(self.checkpoints.drain(end - time.monotonic()))

    def remove_local(self) -> None:
        """Leave nothing on the nodes' disks: the run is done, and on shared storage."""
        if self._local:
            self._local.remove()

    def summary(self) -> dict[str, str]:
        """Rows for the summary of the run."""
        rows = {}
        if self._failures:
            last = max(self._failures)
            text = f"{len(self._failures)}; the last at step {last}: {self._failures[last]}"
            rows["saves that failed"] = text
        if self._local_trouble:
            rows["local checkpoints"] = f"not used: {self._local_trouble}"
        return rows

    @property
    def _first(self) -> Checkpointer:
        """Where the next save goes."""
        return self._local if self._local and not self._local_trouble else self.checkpoints

    @property
    def _shelves(self) -> list[Checkpointer]:
        """Where checkpoints may be, the quickest to read first."""
        return [self._local, self.checkpoints] if self._local else [self.checkpoints]

    def _begin(self, where: Checkpointer, step: int, facts: dict[str, Any]) -> None:
        self._due = False
        self._begun = time.monotonic()
        facts |= {
            "samples": step * self._config.data.global_batch,
            "mesh": self._config.parallel.mesh_text,
            "config": self._config.model_dump(),
        }
        if step == self._evaluated[0]:
            facts["metrics"] = self._evaluated[1]
            worth = self._worth_of(self._evaluated[1])
            if worth is not None:
                self._worth_to_be[step] = worth
        where.begin(step, self._make_state(), **facts)

    def _ended(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self._slow = False
        step, self.problem = outcome.step, ""
        self.seconds = outcome.seconds
        worth = self._worth_to_be.pop(step, None)
        if outcome.problem:
            self._failures[step] = outcome.problem
            self.problem = f"step {step} was not saved: {outcome.problem}"
            self._tell("save_failed", self.problem, step=step, reason=outcome.problem)
        else:
            self._saved_at = step
            if worth is not None:
                self._worth[step] = worth
                self.checkpoints.best = max(self._worth, key=self._worth.__getitem__)
            self._record(outcome)
        if self._first is self.checkpoints:
            self._reckon_interval(outcome)
        if self._local:
            self._local.copy_next()

    def _ended_locally(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        assert self._local  # or nothing could have ended there
        step, self._slow = outcome.step, False
        if outcome.problem:
            self._leave_local(step, outcome.problem)
            self._due = True  # on shared storage
            return
        self._local_at = step
        self._record(outcome, local=True)
        self._reckon_interval(outcome)
        forever = self._options.forever
        stays = step in self._worth_to_be or bool(forever and step % forever == 0)
        self._local.queue(stays)

    def _leave_local(self, step: int, reason: str) -> None:
        """From now on save to shared storage."""
        self._local_trouble = reason
        if self._local:
            self._local.give_up()
        text = f"checkpoint.local is not used any more, saves go to shared storage: {reason}"
        self._tell("save_failed", text, step=step, reason=reason, local=True)

    def _reckon_interval(self, outcome: Outcome) -> None:
        if self._options.auto and self._world.is_main and not outcome.problem:
            least = outcome.seconds / SHARE
            self._interval = max(least, interval.best(outcome.stall, self._between_failures))

    def _record(self, outcome: Outcome, **more: object) -> None:
        if self._world.is_main:
            stall, seconds = round(outcome.stall, 4), round(outcome.seconds, 3)
            fields = {"seconds": seconds, "stall": stall, **more}
            self._run_dir.record("checkpointed", step=outcome.step, **fields)

    def _refused_locally(self, step: int, problem: str) -> None:
        text = f"the local checkpoint of step {step} cannot be used: {problem}"
        self._tell("refused", text, step=step, reason=problem, local=True)

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
                with contextlib.suppress(manifest.Damaged, ConfigError):
                    metrics = manifest.read(path).facts.get("metrics")
                    worth.append((step, self._worth_of(metrics) if metrics else None))
        known = json.loads(self._world.broadcast_text(json.dumps(worth)))
        self._worth = {step: value for step, value in known if value is not None}
        self.checkpoints.best = max(self._worth, key=self._worth.__getitem__, default=None)
