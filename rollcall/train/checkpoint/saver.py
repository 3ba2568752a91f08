"""The saves of a run: when, to which storage, and the reports about them."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcall.train.checkpoint import node_local
from rollcall.train.checkpoint.contents import OBJECTS
from rollcall.train.checkpoint.engine import Engine, Hooks, Restored, SaveResult, restore
from rollcall.train.checkpoint.scores import Best
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.write_plan import differs
from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.run import Run

State = dict[str, Any]
WAIT = 60.0
"""Seconds for which a save that is due waits for the one before it."""
LAST_WAIT = 600.0
"""Seconds for which the end of a run waits for the last save."""


@dataclass(frozen=True)
class Saves:
    """Sums over the ranks about the saves in flight; see `Engine.signals`."""

    shared: list[float]
    local: list[float]
    clock: float  # whether rank 0's clock makes a save due


class Saver:
    """Saves a run when it is due; all ranks make each call together.

    With `checkpoint.local`, a save goes to the nodes' own disks and is copied from there to shared
    storage, as long as the disks work. The last save of an attempt always ends on shared storage.
    """

    def __init__(
        self,
        run: Run,
        make_state: Callable[[], State],
        deadline: Deadline,
        facts: Mapping[str, Any] | None = None,  # about the model, for every checkpoint
    ) -> None:
        options = run.config.checkpoint
        self.problem = ""  # why the newest save to shared storage failed; empty if it succeeded
        self._run, self._deadline = run, deadline
        self._make_state, self._facts = make_state, facts or {}
        self._is_due, self._began = False, time.monotonic()  # a save; the newest one
        self._best = Best(options.keep_best)
        self._hooks = Hooks(run.run_dir.check_claim, self._refused, deadline.is_late)
        keep = options.keep_last, options.keep_every, lambda: self._best.step
        store = CheckpointStore(run.run_dir.checkpoints, run.world, *keep)
        self.checkpoints = Engine(store, self._hooks)
        self._local: node_local.LocalTier | None = None
        self._local_problem = ""  # why saves no longer go to the local disks
        self._saved_at: int | None = None
        self._local_at: int | None = None
        self._failures: dict[int, str] = {}
        self._named: set[str] = set()  # objects that differ between the ranks
        self._rescue: str | None = None  # a word that all ranks know, once it is prepared
        self._is_slow = False  # a save already waited for the one in flight, in vain

    @doing("loading a checkpoint", may_take_long=True)
    def open(self) -> bool:
        """Open the nodes' disks, and return True if there is a checkpoint, or raise ConfigError."""
        run, local = self._run, self._run.config.checkpoint.local
        if local:
            try:
                store = node_local.open_store(local, run.run_dir, run.world)
            except OSError as error:
                self._leave_local(self.checkpoints.store.newest() or 0, str(error))
            else:
                hooks = replace(self._hooks, on_refusal=self._refused_locally)
                engine = Engine(store, hooks, self.checkpoints.buffer)
                mirrors = run.config.checkpoint.mirror
                self._local = node_local.LocalTier(engine, store, self.checkpoints, mirrors)
        return any(tier.store.newest() is not None for tier in self._tiers())

    @doing("loading a checkpoint", may_take_long=True)
    def resume(self, loads: bool = True) -> Restored | None:
        """Load the newest intact checkpoint, if any; ConfigError if only unusable ones exist."""
        run, tiers = self._run, self._tiers()
        for tier in tiers:
            tier.clean()

        def make_state() -> State:
            # What objects hold has any form, and need not be there before it is restored.
            return {name: part for name, part in self._make_state().items() if name != OBJECTS}

        if restored := (restore(tiers, make_state) if loads else None):
            restored.state[OBJECTS] = restored.engine.objects(restored.step)
        step = restored.step if restored else 0
        if restored and restored.engine is self.checkpoints:
            self._saved_at = step
        elif restored:
            self._local_at = step
        self._best.recall(run.run_dir.checkpoints, run.world)
        if self._local:
            self._local.store.forget_after(step)
            if restored and (lent := self._local.store.lent.items()):
                nodes = ", ".join(f"rank {to} got it from that of rank {of}" for to, of in lent)
                run.tell("lent", f"the checkpoint of step {step}: the node of {nodes}", step=step)
        for tier in tiers:
            tier.store.retire()
        return restored

    def report(self) -> Saves:
        """Return this rank's view of the saves in flight, and whether rank 0's clock is up."""
        local = self._local.engine.signals() if self._local else []
        minutes = self._run.config.checkpoint.every_minutes or math.inf
        is_up = not self._is_due and time.monotonic() - self._began > 60 * minutes
        clock = self._run.world.is_main and is_up and not self._target.busy
        return Saves(self.checkpoints.signals(), local, clock)

    @doing("saving a checkpoint", may_take_long=True)
    def settle(self, step: Step, agreed: Saves) -> Action:  # noqa: ARG002
        """Act on the sums of all ranks' reports."""
        self._is_due |= bool(agreed.clock)
        self._ended(self.checkpoints, self.checkpoints.settle(agreed.shared))
        if self._local:
            self._ended(self._local.engine, self._local.engine.settle(agreed.local))
        return Action.CONTINUE

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Note the metrics of an evaluation; request a save of the best model so far."""
        self._is_due |= self._best.evaluated(step, metrics)
        # The last save of the run waits for its evaluation.
        self.checkpoints.amend(step, **self._best.facts(step))

    def is_due(self, step: int) -> bool:
        """Return True to save after this step: for its number, the clock, or its metrics."""
        every = self._run.config.checkpoint.every
        self._is_due |= bool(every and step % every == 0)
        return self._is_due and step not in (self._saved_at, self._local_at)

    @doing("saving a checkpoint", may_take_long=True)
    def begin(self, step: int, **facts: Any) -> None:
        """Begin a save with these facts; wait for the save in flight, but once if it is slow."""
        if self._target.busy and not self._is_slow:
            target = self._target
            self._ended(target, target.wait(WAIT))
            self._is_slow = self._target.busy
            if self._is_slow:
                text = f"step {step} is not saved yet: the previous save is still being written"
                self._run.tell("save_delayed", text, step=step)
        if not self._target.busy:
            self._begin(self._target, step, facts)

    @doing("saving a checkpoint", may_take_long=True)
    def finish(self, step: int, **facts: Any) -> None:
        """Begin the last save, unless the step is on shared storage; `close` waits for it."""
        self._deadline.begin_last_save()
        self.close()
        if self._saved_at != step:
            self._begin(self.checkpoints, step, facts)
        if self._local:
            self._local.finish(WAIT)

    @doing("saving a checkpoint", may_take_long=True)
    def close(self, seconds: float = LAST_WAIT) -> None:
        """Wait for the saves in flight, until this time has passed or the job is about to end."""
        end = time.monotonic() + seconds
        if self._local:
            self._ended(self._local.engine, self._local.engine.drain(seconds))
        while self.checkpoints.busy:
            self._ended(self.checkpoints, self.checkpoints.drain(end - time.monotonic()))
        self.checkpoints.store.retire()  # another checkpoint may be the best now

    @doing("removing local checkpoints", may_take_long=True)
    def remove_local(self) -> None:
        """Remove the files of a run that is done from the nodes' disks; shared storage has all."""
        if self._local:
            self._local.store.remove()

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        rows = {}
        if self._failures:
            count, last = len(self._failures), max(self._failures)
            rows["failed saves"] = f"{count}; the last at step {last}: {self._failures[last]}"
        if self._local_problem:
            rows["local checkpoints"] = f"not used: {self._local_problem}"
        return rows

    def prepare_rescue(self, make_state: Callable[[], State]) -> None:
        """Find out, once, what each rank shares with others; all ranks call it together."""
        run, world = self._run, self._run.world
        may = world.world_size > 1 and world.device.type == "cpu"
        if self._rescue is None and may and run.config.parallel.sync == "step":
            self._rescue = run.run_dir.share_claim(world.broadcast_text)
            self.checkpoints.plan.share(make_state())

    def rescue(self, step: int, make_state: Callable[[], State], **facts: Any) -> None:
        """Save the newest step, if other ranks are lost and all that they held is here.

        No collective is made. Nothing is saved if that step, or one after it, has been saved,
        or if it would take longer than to repeat the steps since the one before.
        """
        saved = max(self._saved_at or 0, self._local_at or 0)
        seconds = time.monotonic() - self._began
        is_worth = self._target.busy or seconds > self._deadline.save_seconds
        if self._rescue and step > saved and is_worth:
            state, facts = make_state(), self._facts_of(step, facts)
            if self.checkpoints.rescue(step, state, f"rescue-{self._rescue}", **facts):
                text = f"saved step {step}, because other ranks are lost"
                print(f"rollcall: {text}", file=sys.stderr, flush=True)
                self._run.run_dir.record("rescued", step=step, rank=self._run.world.rank)

    @property
    def _target(self) -> Engine:
        return self._local.engine if self._local and not self._local_problem else self.checkpoints

    def _tiers(self) -> list[Engine]:
        local = [self._local.engine] if self._local else []
        return [*local, self.checkpoints]  # the fastest to read first

    def _begin(self, engine: Engine, step: int, facts: dict[str, Any]) -> None:
        self._is_due, self._began = False, time.monotonic()
        state = self._make_state()
        self._tell_differences(state.get(OBJECTS, {}), step)
        engine.begin(step, state, **self._facts_of(step, facts))

    def _facts_of(self, step: int, facts: dict[str, Any]) -> dict[str, Any]:
        config = self._run.config
        about = {"mesh": config.parallel.mesh_text, "config": config.model_dump(), **self._facts}
        return facts | about | self._best.facts(step)

    def _tell_differences(self, objects: State, step: int) -> None:
        """Name once the objects of which the ranks have different states."""
        if self._run.world.world_size == 1:
            return
        for name in [name for name in objects if name not in self._named]:
            if differs({name: objects[name]}, self._run.world):
                self._named.add(name)
                text = f"the state of {name} differs between the ranks; a checkpoint holds only one"
                self._run.tell("unsaved_state", text, step=step)

    def _ended(self, engine: Engine, result: SaveResult | None) -> None:
        if result is None:
            return
        self._is_slow = False
        if self._local and engine is not self.checkpoints:
            self._ended_locally(self._local, result)
            return
        step, self.problem = result.step, ""
        self._deadline.save_seconds = result.seconds
        if result.problem:
            self._failures[step] = result.problem
            self.problem = f"step {step} was not saved: {result.problem}"
            self._run.tell("save_failed", self.problem, step=step, reason=result.problem)
        else:
            self._saved_at = step
            self._best.saved(step, result.facts)
            self._record(result)
        if self._local:
            self._local.copy_next()

    def _ended_locally(self, local: node_local.LocalTier, result: SaveResult) -> None:
        step, keep_every = result.step, self._run.config.checkpoint.keep_every
        if result.problem:
            self._leave_local(step, result.problem)
            self._is_due = True  # to shared storage
            return
        self._local_at = step
        self._record(result, local=True)
        may_be_best = self._best.score(result.facts.get("metrics", {})) is not None
        local.queue(result, may_be_best or bool(keep_every and step % keep_every == 0))

    def _leave_local(self, step: int, reason: str) -> None:
        self._local_problem = reason
        if self._local:
            self._local.waiting.clear()
        text = f"saves go directly to shared storage, checkpoint.local is no longer used: {reason}"
        self._run.tell("save_failed", text, step=step, reason=reason, local=True)

    def _record(self, result: SaveResult, **more: object) -> None:
        stall, seconds = round(result.stall, 4), round(result.seconds, 3)
        self._run.record("checkpointed", step=result.step, seconds=seconds, stall=stall, **more)

    def _refused(self, step: int, problem: str) -> None:
        text = f"{self.checkpoints.store.path_of(step)} is damaged and was set aside: {problem}"
        self._run.tell("refused", text, step=step, reason=problem)

    def _refused_locally(self, step: int, problem: str) -> None:
        text = f"the local checkpoint of step {step} cannot be used: {problem}"
        self._run.tell("refused", text, step=step, reason=problem, local=True)
