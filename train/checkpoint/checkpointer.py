"""What survives? Saves that run beside the training, and loads that trust nothing."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint import manifest, read, shelf, write
from train.checkpoint.background import Forked, Job, PinnedBuffer, Threaded, in_place
from train.checkpoint.flight import Flight, Outcome
from train.checkpoint.manifest import Damaged
from train.checkpoint.plan import Plan
from train.config import ConfigError
from train.world import World

Start = Callable[[Callable[[], object]], Job]


class Checkpointer:
    """Saves and loads the state of a run; every rank makes each call together.

    Attributes:
        directory: where the checkpoints of this run lie.
        best: the step of the checkpoint that stays because it is the best one.
        before_publishing: called on rank 0 right before a checkpoint gets its name; an OSError
            from it stops that. The place for a check that this attempt still owns the run.
        on_refusal: called on every rank with the step of a damaged checkpoint and what is wrong.
        is_late: asked on rank 0 while a save is waited for; true ends the waiting.
    """

    _whole = True  # each checkpoint holds the whole state

    def __init__(
        self, directory: Path, world: World, keep: int = 2, forever: int | None = None
    ) -> None:
        """Look at nothing yet.

        Args:
            directory: where the checkpoints of this run lie.
            world: the ranks that save and load.
            keep: how many of the newest stay.
            forever: checkpoints of the multiples of this step stay, too.
        """
        self.directory = directory
        self.best: int | None = None
        self.before_publishing: Callable[[], object] = lambda: None
        self.on_refusal: Callable[[int, str], object] = lambda *_: None
        self.is_late: Callable[[], bool] = lambda: False
        self._world = world
        self._keep, self._forever = keep, forever
        self._publishes = world.is_main
        self._publishers = 1
        self._where = ""
        self._ranks: Sequence[int] = range(world.world_size)  # whose parts this one publishes
        self._plan = Plan(world)
        self._buffer = PinnedBuffer() if world.device.type == "cuda" else None
        self._flight: Flight | None = None
        self._owner = self._nonce = ""
        self._count = 0
        self._refused: set[int] = set()  # those that lie where they were

    @property
    def busy(self) -> bool:
        """Whether a save is in flight; all ranks have the same answer after each `settle`."""
        return self._flight is not None

    def save(self, step: int, state: dict[str, Any], **facts: Any) -> Path:
        """Write the state after `step` updates, and wait until it is published.

        Args:
            step: how many updates the state contains.
            state: nested dictionaries of tensors and plain values under global names.
            facts: further plain values for the manifest.

        Raises:
            OSError: it could not be written; earlier ones are untouched.
        """
        self.begin(step, state, **facts)
        outcome = self.drain()
        if outcome and outcome.problem:
            raise OSError(outcome.problem)
        return shelf.place(self.directory, step)

    def begin(self, step: int, state: dict[str, Any], **facts: Any) -> None:
        """Start to save; what changes in the state after this call is not in the checkpoint.

        `signals` and `settle` bring it to its end, or `drain`. One save can be in flight.
        """
        assert not self._flight, "one save at a time"
        began = time.monotonic()
        tensors, values = self._plan.mine(state)
        boxes, parts = [box for box, _ in tensors], [tensor for _, tensor in tensors]
        start: Start = Threaded if self._buffer else Forked
        views = self._buffer.copy(parts) if self._buffer else in_place(parts)
        # What `toreadonly` returns is the same memory: nothing is copied once more.
        items = [(box, view.toreadonly) for box, view in zip(boxes, views, strict=True)]
        part = partial(write.write_part, rank=self._world.rank, items=items, values=values)
        self._take_off(step, start, part, self._about(step) | facts, began)

    def begin_copy(
        self, step: int, write_part: Callable[[Path], object], facts: dict[str, Any]
    ) -> None:
        """Start a save of what is on disk elsewhere.

        Args:
            step: how many updates it contains.
            write_part: called beside the training; writes this rank's part into a directory.
            facts: all those of the manifest.
        """
        assert not self._flight, "one save at a time"
        self._take_off(step, Threaded, write_part, facts, time.monotonic())

    def signals(self) -> list[bool]:
        """What this rank knows of the save in flight: own part written, published, failed."""
        return self._flight.signals() if self._flight else [False, False, False]

    def settle(self, sums: Sequence[float]) -> Outcome | None:
        """Go on with the save in flight; every rank must call it with the same sums of `signals`.

        Returns:
            How the save ended, once it has.
        """
        outcome = self._flight.settle(sums) if self._flight else None
        if outcome:
            self._flight = None
        return outcome

    def wait(self, seconds: float = math.inf) -> Outcome | None:
        """Wait for the save in flight, but no longer than this by the clock of rank 0, nor late."""
        deadline = time.monotonic() + seconds
        outcome, late, pause = None, False, 0.001
        while self._flight and not late:
            waited = self._world.is_main and (time.monotonic() > deadline or self.is_late())
            sums = torch.tensor([*self.signals(), waited], dtype=torch.float32)
            dist.all_reduce(sums)
            outcome, late = self.settle(sums[:-1].tolist()), bool(sums[-1])
            if not outcome:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        return outcome

    def drain(self, seconds: float = math.inf) -> Outcome | None:
        """Wait for the save in flight, and give it up after so many seconds."""
        began = time.monotonic()
        outcome = self.wait(seconds)
        if self._flight:
            self._flight.late = f"it was not on disk after {time.monotonic() - began:.0f} s"
            if self.is_late():
                self._flight.late += ", when the job was about to end"
            outcome = self.settle([0, 0, 1])
        return outcome

    def newest(self) -> int | None:
        """The step of the newest checkpoint that was not refused, the same on every rank."""
        found = shelf.published(self.directory) if self._world.is_main else {}
        newest = max(found.keys() - self._refused, default=None)
        return json.loads(self._world.broadcast_text(json.dumps(newest)))  # type: ignore[no-any-return]

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state` in place from the checkpoint of this step.

        Raises:
            ConfigError: it is damaged, or belongs to another model or version.
        """
        problem = self._load(step, state)
        if problem:
            raise ConfigError(f"{shelf.place(self.directory, step)} is damaged: {problem}")

    def restore(
        self, make_state: Callable[[], dict[str, Any]]
    ) -> tuple[int, dict[str, Any]] | None:
        """Fill a state from the newest checkpoint that is whole; set damaged ones aside.

        Args:
            make_state: what is filled in place; called if there is something to load.

        Returns:
            The step and the state, or None where nothing was ever saved.

        Raises:
            ConfigError: what there is belongs to another model or version, or nothing is whole.
        """
        found = restore([self], make_state)
        return found and found[:2]

    def clean(self) -> None:
        """Remove what attempts that were killed while saving have left."""
        if self._publishes:
            shelf.clean(self.directory)
        self._world.barrier()

    def retire(self) -> None:
        """Remove what need not stay, as every save does; after a load has shown what is whole."""
        if self._publishes:
            found = shelf.published(self.directory)
            # Not the refused ones that could not be set aside: they keep no whole one from staying.
            for step in self._stale([step for step in found if step not in self._refused]):
                shelf.retire(found[step])

    def _stale(self, steps: Sequence[int]) -> list[int]:
        return shelf.stale(steps, self._keep, self._forever, self.best)

    def _about(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "time": time.time(),
            "torch": torch.__version__,
            "world_size": self._world.world_size,
        }

    def _take_off(
        self,
        step: int,
        start: Start,
        write_part: Callable[[Path], object],
        facts: dict[str, Any],
        began: float,
    ) -> None:
        if not self._owner:
            self._owner = self._world.broadcast_text(shelf.owner())
        self._count += 1
        self._nonce = f"{zlib.crc32(f'{self._owner}{self._count}'.encode()):08x}"
        written = shelf.beside(self.directory, step, f"{self._writer()}-{self._nonce}")
        own = start(partial(write_part, written))
        publish = partial(self._publish, written, step, facts) if self._publishes else None
        self._flight = Flight(self._world, step, written, own, publish, began, self._publishers)

    def _writer(self) -> str:
        return self._owner.rpartition("-")[0]

    def _load(self, step: int, state: dict[str, Any], fill: bool = True) -> str:
        path = shelf.place(self.directory, step)
        unfit, damage = "", ""
        with shelf.reading(path):
            try:
                stored = manifest.read(path, self._whole)
                if stored.step != step:
                    raise Damaged(f"{manifest.NAME} is that of step {stored.step}")
                read.load(path, stored, state, self._whole, fill)
            except ConfigError as error:
                unfit = str(error)
            except Damaged as error:
                damage = f"{self._where}{error}"
            self._world.raise_together(unfit)
            return self._world.first_problem(damage)

    def _refuse(self, step: int, problem: str) -> None:
        if self._world.is_main:
            try:
                shelf.set_aside(shelf.place(self.directory, step))
            except OSError as error:
                self._refused.add(step)
                problem += f" (it could not be set aside: {error.strerror})"
        self.on_refusal(step, problem)

    def _refuse_to_start_afresh(self) -> None:
        aside = shelf.refused(self.directory) if self._world.is_main else []
        self._world.raise_together(
            f"{self.directory} holds no whole checkpoint: {', '.join(path.name for path in aside)} "
            f"{'was' if len(aside) == 1 else 'were'} refused as damaged, and nothing was deleted. "
            "`python -m train checkpoint verify` names the files; put back a copy of one, or give "
            "this run another run.name to start afresh"
            if aside or self._refused
            else ""
        )

    def _publish(self, written: Path, step: int, facts: dict[str, Any]) -> None:
        final = shelf.place(self.directory, step)
        write.publish(written, final, self._ranks, facts, self.before_publishing, self._whole)
        self._refused.discard(step)
        self.retire()


def restore(
    shelves: Sequence[Checkpointer], make_state: Callable[[], dict[str, Any]]
) -> tuple[int, dict[str, Any], Checkpointer] | None:
    """Fill a state from the newest checkpoint of some shelves that is whole, as `restore` of one.

    Args:
        shelves: where to look; of two with the same step the first is taken.
        make_state: what is filled in place; called if there is something to load.

    Returns:
        The step, the state and the shelf, or None where nothing was ever saved.

    Raises:
        ConfigError: what there is belongs to another model or version, or nothing is whole.
    """
    state: dict[str, Any] | None = None
    while True:
        steps = [each.newest() for each in shelves]
        newest = max((step for step in steps if step is not None), default=None)
        if newest is None:
            break
        chosen = shelves[steps.index(newest)]
        state = state or make_state()
        problem = chosen._load(newest, state)
        if not problem:
            return newest, state, chosen
        chosen._refuse(newest, problem)
    for each in shelves:
        each._refuse_to_start_afresh()
    return None
