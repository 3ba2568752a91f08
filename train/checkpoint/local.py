"""Where is a state saved first? On each node's own disk; from there it is copied to shared storage.

A checkpoint on a node's disk has the format of any other, but holds only what the node's own ranks
hold. Each rank then copies a share of what it wrote itself, so that together they make up the whole
state once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint import manifest, read, shelf, write
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.manifest import Damaged, Manifest
from train.checkpoint.plan import Plan, number
from train.config import ConfigError
from train.run import RunDir, write_atomic
from train.world import World

KEEP = 2  # while the nodes publish a new one, the one before is whole on all of them


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the nodes' disks.

    Attributes:
        share: the boxes and values that this rank copies.
        stays: it is to reach shared storage, even if there is a newer one by then.
    """

    step: int
    facts: dict[str, Any]
    share: frozenset[int]
    stays: bool


class Local(Checkpointer):
    """Saves and loads on the nodes' own disks, and copies; every rank makes each call together."""

    _whole = False

    def __init__(
        self,
        directory: Path,
        world: World,
        shared: Checkpointer,
        run: str,
        nodes: Sequence[int],
        writer: int,
    ) -> None:
        """Look at nothing yet.

        Args:
            directory: of this run, on this node.
            world: the ranks that save and load.
            shared: makes the copies.
            run: a word that tells this run from an earlier one in the same directory.
            nodes: the node of each rank, as a number.
            writer: the process id of the first rank of this node.
        """
        super().__init__(directory, world, KEEP)
        self._ranks = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
        self._publishes = world.rank == self._ranks[0]
        self._publishers = len(set(nodes))
        self._plan = Plan(world, nodes)
        self._buffer = shared._buffer  # never both at once
        self._where = f"on {world.host}: "
        self._shared = shared
        self._run = run
        self._pid = writer
        self._facts: dict[str, Any] = {}
        self._waiting: list[Saved] = []
        self._copying: list[Saved] = []

    def begin(self, step: int, state: dict[str, Any], **facts: Any) -> None:
        """As of every checkpointer; ended without a problem, `queue` it."""
        facts = {"time": time.time()} | facts
        super().begin(step, state, **facts)
        self._facts = self._about(step) | facts

    def queue(self, stays: bool) -> None:
        """Let the save that has just ended be copied when its turn comes; older ones need not be.

        Args:
            stays: it is to be copied even if there is a newer one by then.
        """
        saved = Saved(self._facts["step"], self._facts, self._plan.once, stays)
        self._waiting = [*(older for older in self._waiting if older.stays), saved]
        self.copy_next()

    def copy_next(self) -> None:
        """Start the next copy, unless shared storage has a save in flight."""
        if self._shared.busy:
            return
        self._copying, self._waiting = self._waiting[:1], self._waiting[1:]
        for saved in self._copying:
            source = shelf.place(self.directory, saved.step)
            part = partial(_copy, source, self._where, self._world.rank, saved.share)
            self._shared.begin_copy(saved.step, part, saved.facts)

    def give_up(self) -> None:
        """Copy nothing more."""
        self._waiting = []

    def newest(self) -> int | None:
        """The step of the newest that any node has and that was not refused."""
        mine = max(shelf.published(self.directory).keys() - self._refused, default=-1)
        newest = torch.tensor([mine])
        dist.all_reduce(newest, dist.ReduceOp.MAX)
        return int(newest) if newest >= 0 else None

    def forget_after(self, step: int) -> None:
        """Remove what is newer than the state that the run goes on from: it will be saved again."""
        self._refused.clear()
        if self._publishes:
            for newer, path in shelf.published(self.directory).items():
                if newer > step:
                    shelf.retire(path)

    def remove(self) -> None:
        """Remove all that the run has on this node's disk."""
        if self._publishes:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _writer(self) -> str:
        return f"{self._world.host}-{self._pid}"

    def _publish(self, written: Path, step: int, facts: dict[str, Any]) -> None:
        super()._publish(written, step, facts | {"run": self._run, "save": self._nonce})

    def _stale(self, steps: Sequence[int]) -> list[int]:
        needed = {saved.step for saved in (*self._waiting, *self._copying)}
        return [step for step in super()._stale(steps) if step not in needed]

    def _load(self, step: int, state: dict[str, Any], fill: bool = True) -> str:
        save, problem = "", ""
        try:
            save = str(_load(shelf.place(self.directory, step)).facts.get("save"))
        except (Damaged, ConfigError) as error:
            problem = f"{self._where}{error}"
        # An attempt that was fenced off may have saved the same step a little differently.
        if save != self._world.broadcast_text(save) and not problem:
            problem = f"{self._where}it is of another save than that of rank 0"
        problem = self._world.first_problem(problem)
        if not problem and self._shared.newest() is None:
            # If it is damaged the run begins afresh: nothing of it may get into any rank's state.
            problem = super()._load(step, state, fill=False)
        return problem or super()._load(step, state, fill)

    def _refuse(self, step: int, problem: str) -> None:
        self._refused.add(step)
        self.on_refusal(step, problem)

    def _refuse_to_start_afresh(self) -> None:
        """Local disks may be lost: what shared storage has decides."""


def place(text: str, run_dir: RunDir) -> Path:
    """Where a run keeps checkpoints on this node.

    Args:
        text: `checkpoint.local`, which may name variables of the environment.

    Raises:
        ConfigError: a variable is not set, or the path is not absolute.
    """
    root = os.path.expandvars(text)
    if "$" in root or not root.startswith("/"):
        raise ConfigError(
            f"checkpoint.local={text} is {root} here: expected an absolute path on a disk of the "
            "node, in which every variable is set"
        )
    digest = hashlib.blake2b(os.fsencode(run_dir.path), digest_size=4).hexdigest()
    return Path(root) / f"{run_dir.name}-{digest}"


def open_local(text: str, run_dir: RunDir, world: World, shared: Checkpointer) -> Local:
    """Make the directories on all nodes, and find out which ranks share one.

    Raises:
        ConfigError: a directory cannot be meant, or is not safe.
        OSError: a disk takes no files.
    """
    unfit = trouble = run = ""
    word = world.broadcast_text(os.urandom(4).hex())  # an attempt that was killed has left others
    with contextlib.ExitStack() as stack:
        try:
            directory = place(text, run_dir)
            _make(directory)
            stack.enter_context(_probe(directory, f"{word}-{world.rank}"))
            run = _word(run_dir) if world.is_main else ""
        except ConfigError as error:
            unfit = f"{error} (rank {world.rank} on {world.host})"
        except OSError as error:
            trouble = f"{error.filename} on {world.host}: {error.strerror}"
        world.raise_together(unfit)
        trouble = world.first_problem(trouble)
        if trouble:
            raise OSError(trouble)
        nodes, pids = _gather(_identity(directory, world), os.getpid())
        elsewhere = nodes[world.rank] != nodes[0] and _probe_of(directory, f"{word}-0").exists()
        world.raise_together(
            f"checkpoint.local={text} is one directory for several hosts: expected one on each "
            "node's own disk"
            if elsewhere
            else ""
        )
    run = world.broadcast_text(run)
    writer = pids[nodes.index(nodes[world.rank])]
    opened = Local(directory, world, shared, run, nodes, writer)
    if opened._publishes:
        _forget_others(directory, run)
        for probe in directory.glob(_probe_of(directory, "*").name):
            probe.unlink(missing_ok=True)
    return opened


def _copy(source: Path, where: str, rank: int, share: frozenset[int], written: Path) -> None:
    """Write this rank's part of a checkpoint from what it has on this node's disk."""
    try:
        stored = _load(source)
        with read.Files(source) as files:
            items = [
                item
                for item in _items(stored, files)
                if number(item[0].key, item[0].offset) in share
            ]
            values = [each for each in stored.values.values() if number(each[0]) in share]
            write.write_part(written, rank, items, values)
    except Damaged as error:
        raise Damaged(f"{source} {where}{error}") from None


def _items(stored: Manifest, files: read.Files) -> Iterator[write.Item]:
    for tensor in stored.tensors.values():
        for piece in tensor.pieces:
            box = write.Box(tensor.key, tensor.dtype, tensor.shape, piece.offset, piece.shape)
            yield box, partial(_bytes, files, tensor, piece)


def _bytes(files: read.Files, tensor: manifest.Stored, piece: manifest.Piece) -> memoryview:
    return read.view(files.piece(tensor, piece))


def _load(path: Path) -> Manifest:
    return manifest.load(path, whole=False)


def _make(directory: Path) -> None:
    """Make a directory for this user alone; one that others have planted is refused."""
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others:
        raise ConfigError(
            f"{directory} is a link, belongs to another user, or others may write there: expected "
            "a directory of your own; remove it, or choose another checkpoint.local"
        )


def _probe_of(directory: Path, name: str) -> Path:
    return directory / f".probe-{name}"


@contextlib.contextmanager
def _probe(directory: Path, name: str) -> Iterator[None]:
    """A file of this rank, for a while: the disk takes files, and others may look for it."""
    path = _probe_of(directory, name)
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _word(run_dir: RunDir) -> str:
    """The word by which nodes know what is of this run; made when it is first asked for."""
    path = run_dir.path / "local"
    if not path.exists():
        write_atomic(path, os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def _identity(directory: Path, world: World) -> int:
    """Equal for ranks that share the directory, and for no others."""
    status = directory.stat()
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((world.host, status.st_dev, status.st_ino)).encode())
    return int.from_bytes(digest.digest(), "big", signed=True)


def _gather(*numbers: int) -> list[list[int]]:
    """For each of the numbers, those of all ranks."""
    mine = torch.tensor(numbers)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).T.tolist()


def _forget_others(directory: Path, run: str) -> None:
    """Remove what a run has left here whose run directory has been removed."""
    for path in shelf.published(directory).values():
        with contextlib.suppress(Damaged, ConfigError):
            if _load(path).facts.get("run") != run:
                shelf.retire(path)
