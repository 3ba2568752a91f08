"""The engine that saves a state beside the training, and loads only what is intact."""

import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rollcall.config import ConfigError
from rollcall.messages.text import listed
from rollcall.train.checkpoint import background, layout, manifest, read, write
from rollcall.train.checkpoint.background import PinnedBuffer, ThreadJob, WriteJob
from rollcall.train.checkpoint.contents import OBJECTS, Damaged, Manifest
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.write_plan import Tensors, WritePlan

MakeState = Callable[[], dict[str, Any]]
StartJob = Callable[[Callable[[], object]], WriteJob]
WritePart = Callable[[Path], object]
OUTER, REPLICAS = "outer", "replicas-"
"""Parts with the state of an outer optimizer, and of each of so many replicas that train alone.
Runs that have neither, or another number of replicas, can still load the rest."""
FIRST = 0.1
"""Seconds for which ranks let the first replica begin to save what is left after a loss."""


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    step: int
    facts: dict[str, Any]
    problem: str  # why it failed; empty if it succeeded
    stall: float  # seconds for which it held up training on this rank
    seconds: float  # from its start until this rank knew that it had ended


@dataclass
class PendingSave:
    """A save in flight, on which all ranks agree: they see only sums of `signals` over them."""

    store: CheckpointStore
    step: int
    facts: dict[str, Any]
    written: Path  # the directory that all ranks write into
    part_job: WriteJob  # writes this rank's part
    publish: Callable[[], object]  # called when all parts are written, if this rank publishes
    began: float  # by time.monotonic
    late: str = ""  # why the ranks stopped waiting for it; empty until they do
    _publishing: WriteJob | None = None
    _all_written: bool = False

    def __post_init__(self) -> None:
        self._stall = time.monotonic() - self.began  # training continues from here

    def signals(self) -> list[float]:
        """Return three flags of this rank: its part is written, it has published, it has failed."""
        published = self._publishing is not None and self._publishing.poll() == ""
        # As numbers: a sum of booleans over the ranks never exceeds one.
        return [*map(float, (self.part_job.poll() == "", published, bool(self._problem())))]

    def settle(self, sums: Sequence[float]) -> SaveResult | None:
        """Act on the sums of all ranks' signals; return the result once the save has ended."""
        written, published, failed = sums
        if failed:
            return self._result(self._fail())
        if published == len(self.store.publishers):
            return self._result("")
        if written == self.store.world.world_size and not self._all_written:
            self._all_written = True
            if self.store.publishes:
                self._publishing = ThreadJob(self.publish)
        return None

    def _problem(self) -> str:
        problems = (job.poll() for job in (self.part_job, self._publishing) if job)
        return next(filter(None, problems), self.late)

    def _fail(self) -> str:
        problem = self.store.world.first_problem(self._problem())
        self.part_job.abandon()
        # The publishing thread may be renaming it now; deleting would empty the checkpoint.
        may_be_published = self._publishing is not None and not self._publishing.poll()
        if self.store.publishes and not may_be_published:
            ThreadJob(partial(rmtree, self.written, ignore_errors=True))
        return problem

    def _result(self, problem: str) -> SaveResult:
        seconds = time.monotonic() - self.began
        return SaveResult(self.step, self.facts, problem, self._stall, seconds)


@dataclass(frozen=True)
class Hooks:
    """Functions that an engine calls."""

    # On publishing ranks, right before a checkpoint gets its name; an OSError stops that. It may
    # check that this attempt still owns the run.
    before_publishing: Callable[[], object] = lambda: None
    # On every rank, with the step of a damaged checkpoint and the damage.
    on_refusal: Callable[[int, str], object] = lambda *_: None
    is_late: Callable[[], bool] = lambda: False  # on rank 0; True ends the wait for a save


class Engine:
    """Saves to a store and loads from it; all ranks make each call together."""

    def __init__(
        self, store: CheckpointStore, hooks: Hooks | None = None, buffer: PinnedBuffer | None = None
    ) -> None:
        """Use a store, and perhaps the buffer of an engine that never saves at the same time."""
        self.store = store
        self._world = world = store.world
        self.plan = WritePlan(world, store.nodes)
        self.buffer = buffer
        if buffer is None and world.device.type == "cuda":
            self.buffer = PinnedBuffer()
        self._hooks = hooks or Hooks()
        self._pending: PendingSave | None = None
        self.facts: dict[str, Any] = {}  # of the checkpoint that was loaded last
        self._owner, self._count = "", 0
        self._versions = {"torch": torch.__version__, "world_size": world.world_size}

    @property
    def busy(self) -> bool:
        """True while a save is in flight; after each `settle`, all ranks agree."""
        return self._pending is not None

    def begin(self, step: int, state: dict[str, Any], **facts: Any) -> None:
        """Start a save of the state after `step` updates; later changes are not in the checkpoint.

        To finish it, call `settle` with the sums of `signals` after every step, or call `drain`.
        The state is nested dictionaries of tensors and plain values under global names; the facts
        are further plain values. Raise ConfigError for anything else in the state.
        """
        if self._pending:
            raise RuntimeError(
                f"the save of step {self._pending.step} is still in flight: wait for it with "
                "drain(), or begin the next one when `busy` is false"
            )
        began = time.monotonic()
        tensors, values = self.plan.share(state)
        start: StartJob = ThreadJob if self.buffer else background.ProcessJob
        sources = _sources(tensors, self.buffer.copy if self.buffer else background.host_views)
        part = partial(write.write_part, rank=self._world.rank, chunks=sources, values=values)
        about = {"step": step, "time": time.time(), **self._versions}
        self.start(step, part, about | facts, start, began)

    def amend(self, step: int, **facts: Any) -> None:
        """Add facts to the save of a step in flight; all ranks call it, before any settles it."""
        if self._pending and self._pending.step == step:
            self._pending.facts.update(facts)

    def signals(self) -> list[float]:
        """Return 0 or 1 for the save in flight: this rank's part written, published, failed."""
        return self._pending.signals() if self._pending else [0.0, 0.0, 0.0]

    def settle(self, sums: Sequence[float]) -> SaveResult | None:
        """Continue the save with the sums of all ranks' `signals`; return the result at its end."""
        if result := (self._pending.settle(sums) if self._pending else None):
            self._pending = None
        return result

    def wait(self, seconds: float = math.inf) -> SaveResult | None:
        """Wait for the save in flight, until rank 0's clock or `is_late` ends the wait."""
        deadline = time.monotonic() + seconds
        result, late, pause = None, False, 0.001
        while self._pending and not late:
            waited = self._world.is_main and (time.monotonic() > deadline or self._hooks.is_late())
            sums = torch.tensor([*self.signals(), waited], dtype=torch.float32)
            dist.all_reduce(sums)
            result, late = self.settle(sums[:-1].tolist()), bool(sums[-1])
            if not result:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        return result

    def drain(self, seconds: float = math.inf) -> SaveResult | None:
        """Wait for the save in flight; abandon it after this many seconds."""
        began = time.monotonic()
        result = self.wait(seconds)
        if self._pending:
            self._pending.late = f"it was not on disk after {time.monotonic() - began:.0f} s"
            if self._hooks.is_late():
                self._pending.late += ", and the job was about to end"
            result = self.settle([0, 0, 1])
        return result

    def abandon(self) -> None:
        """Drop this rank's part of the save in flight, without a word to the others."""
        if pending := self._pending:
            pending.part_job.abandon()
            rmtree(pending.written, ignore_errors=True)
        self._pending = None

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state` in place; ConfigError if the checkpoint is damaged or does not fit."""
        if problem := self.try_load(step, state):
            raise ConfigError(f"{self.store.path_of(step)} is damaged: {problem}")

    def try_load(
        self, step: int, state: dict[str, Any], fill: bool = True, complete: bool = False
    ) -> str:
        """Fill `state` in place and return the damage that any rank met; empty if all is intact.

        Without `fill`, only check what it needs. Parts of replicas that are not stored are removed
        from the state. All that is stored must be in the state of some rank; if `complete`, also
        whole parts such as `ema`. Otherwise, and for another model or version, raise ConfigError.
        """
        self.store.complete(step, partial(self.plan.of_node, state))
        if problem := self.store.mismatch(step):
            return problem
        path, whole = self.store.path_of(step), self.store.whole
        damage, names = "", set[str]()
        stored: Manifest | None = None
        with layout.reading(path):
            with self._world.together():
                try:
                    stored = manifest.read(path, whole)
                    if stored.step != step:
                        raise Damaged(f"{manifest.NAME} belongs to step {stored.step}")
                    held = {key.key[0] for key in stored.tensors.values()}
                    for part in {*state} - held:
                        if not complete and part.startswith((OUTER, REPLICAS)):
                            del state[part]
                    names = read.load(path, stored, state, whole, fill)
                except Damaged as error:
                    damage = f"{self.store.host_note}{error}"
            problem = self._world.first_problem(damage)
        if stored and not problem:
            self.facts = stored.facts
            if whole:
                self._check_all_loaded(path, stored, names, None if complete else {*state})
        return problem

    def objects(self, step: int) -> dict[str, Any]:
        """Return the states of objects in a checkpoint, by name; ConfigError if it is damaged."""
        path = self.store.path_of(step)
        with layout.reading(path), self._world.together():
            try:
                state = read.nested(path, manifest.read(path, self.store.whole), OBJECTS)
            except Damaged as error:
                raise ConfigError(f"{path} is damaged: {self.store.host_note}{error}") from None
        return state.get(OBJECTS, {})  # type: ignore[no-any-return]

    def _check_all_loaded(
        self, path: Path, stored: Manifest, names: set[str], parts: set[str] | None
    ) -> None:
        """Raise ConfigError if the checkpoint holds names of these parts that no rank loaded."""
        keys = {name: tensor.key for name, tensor in stored.tensors.items()}
        keys |= {name: key for name, (key, _) in stored.values.items()}
        expected = [name for name, key in keys.items() if parts is None or str(key[0]) in parts]
        is_loaded = torch.tensor([name in names for name in expected], dtype=torch.uint8)
        dist.all_reduce(is_loaded, dist.ReduceOp.MAX)
        flags = zip(expected, is_loaded.tolist(), strict=True)
        if lost := [name for name, flag in flags if not flag]:
            raise ConfigError(
                f"{path} holds {listed(lost)}, but the state to fill does not, and would lose "
                "them. Give the same model, optimizer and other objects as when it was saved"
            )

    def refuse(self, step: int, problem: str) -> None:
        """Exclude a damaged checkpoint from further loads, and report it."""
        self._hooks.on_refusal(step, problem + self.store.refuse(step))

    def clean(self) -> None:
        """Remove what killed attempts left in the middle of a save."""
        if self.store.publishes:
            layout.clean(self.store.directory)
        self._world.barrier()

    def start(
        self,
        step: int,
        write_part: WritePart,
        facts: dict[str, Any],
        job: StartJob = ThreadJob,
        began: float | None = None,
    ) -> None:
        """Start a save in which a job, by default a thread, writes this rank's part."""
        if not self._owner:
            self._owner = self._world.broadcast_text(layout.owner())
        self._count += 1
        save_id = f"{zlib.crc32(f'{self._owner}{self._count}'.encode()):08x}"
        writer = f"{self.store.writer(self._owner)}-{save_id}"
        written = layout.unpublished(self.store.directory, step, writer)
        publish = partial(self._publish, written, step, facts, save_id)
        began = time.monotonic() if began is None else began
        writing = job(partial(write_part, written))
        self._pending = PendingSave(self.store, step, facts, written, writing, publish, began)

    def rescue(self, step: int, state: dict[str, Any], name: str, **facts: Any) -> bool:
        """Save a state without the ranks that are lost; return True if this rank published it.

        The first rank that comes here writes what it shares with others, and the last one to finish
        publishes, under a `name` that all ranks know. A state is saved only if other ranks hold all
        that any rank holds; `WritePlan.share` has found that out. As in Just-In-Time Checkpointing
        (Gupta et al., EuroSys 2024), https://doi.org/10.1145/3627703.3650085.
        """
        store, groups = self.store, self.plan.groups
        written = layout.unpublished(store.directory, step, name)
        if not groups:
            return False
        if not self.plan.is_first:  # as in any save, buffers are to be the first replica's
            time.sleep(FIRST)
        if store.path_of(step).exists():
            return False
        written.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken: list[Path] = []

        def take(group: int) -> bool:
            path = written / f"taken-{group}"
            with suppress(FileExistsError):
                path.open("x").close()
                taken.append(path)
            return path in taken

        tensors, values = self.plan.taken(state, take)
        if not taken:
            return False
        sources = _sources(tensors, background.host_views)
        write.write_part(written, self._world.rank, sources, values)
        for path in taken:
            path.with_suffix(".done").touch()
        if len([*written.glob("*.done")]) < groups:
            return False
        facts |= {"step": step, "time": time.time(), **self._versions}
        final, check = store.path_of(step), self._hooks.before_publishing
        with suppress(FileExistsError, FileNotFoundError):  # another rank has ended just now, too
            write.publish(written, final, write.writers(written), facts, check)
            for path in final.glob("taken-*"):  # not before: a late rank would take it again
                path.unlink()
            return True
        return False

    def _publish(self, written: Path, step: int, facts: dict[str, Any], save_id: str) -> None:
        store, check = self.store, self._hooks.before_publishing
        facts = facts | store.facts(save_id, self.plan.held)
        write.publish(written, store.path_of(step), store.ranks, facts, check, store.whole)
        store.accept(step)


def _sources(
    tensors: Tensors, copy: Callable[[list[torch.Tensor]], list[memoryview]]
) -> list[write.ChunkSource]:
    views = zip(tensors, copy([tensor for _, tensor in tensors]), strict=True)
    # `toreadonly` copies nothing: it returns a view of the same memory.
    return [(chunk, view.toreadonly) for (chunk, _), view in views]


class Restored(NamedTuple):
    """A state that was loaded, its step, and the engine that loaded it."""

    step: int
    state: dict[str, Any]
    engine: Engine


def restore(
    tiers: Sequence[Engine], make_state: MakeState, complete: bool = False
) -> Restored | None:
    """Fill a state from the newest intact checkpoint of several tiers, and refuse damaged ones.

    If two tiers have the same step, the first is read. `make_state` is called only if there is
    something to load. Raise ConfigError as `Engine.try_load` does, or if none is intact.
    """
    made: dict[str, Any] | None = None
    while True:
        steps = [tier.store.newest() for tier in tiers]
        newest = max((step for step in steps if step is not None), default=None)
        if newest is None:
            break
        tier = tiers[steps.index(newest)]
        made = made or make_state()
        state, problem = {**made}, ""
        if not tier.store.whole and steps.count(None) == len(steps) - 1:
            # If this last checkpoint is damaged, the run starts at step 0 with an unchanged state.
            problem = tier.try_load(newest, state, fill=False)
        problem = problem or tier.try_load(newest, state, complete=complete)
        if not problem:
            return Restored(newest, state, tier)
        tier.refuse(newest, problem)
    for tier in tiers:
        tier.store.check_fresh_start()
    return None
