"""Checkpoints on the nodes' own disks, in the same format.

A node's checkpoint holds only what its ranks hold, and each node publishes its own. Then each rank
copies a share of it to shared storage; together the shares are the whole state once.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollcall.config import ConfigError
from rollcall.records.run_dir import RunDir
from rollcall.system.files import write_atomic
from rollcall.train.checkpoint import layout, lending, manifest, read, write
from rollcall.train.checkpoint.contents import Chunk, Damaged
from rollcall.train.checkpoint.engine import Engine, SaveResult
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.write_plan import identify
from rollcall.train.ranks.world import World

KEEP = 2
"""Checkpoints kept: while the nodes publish a new one, the previous one is complete on all."""


class NodeLocalStore(CheckpointStore):
    """A directory on each node's own disk; the first rank of each node publishes."""

    whole = False

    def __init__(
        self, directory: Path, world: World, run_id: str, nodes: Sequence[int], writer_pid: int
    ) -> None:
        """Take a number for each rank's node, and the process id of this node's first rank."""
        super().__init__(directory, world, KEEP, nodes=nodes)
        self.host_note = f"on {world.host}: "
        self._run_id = run_id  # distinguishes this run from an earlier one of the same name
        self._writer_pid = writer_pid
        self.mirrored = directory / "mirrored"  # the copies that this node keeps for another one
        self.lent: dict[int, int] = {}  # the lender's rank, by the borrower's

    def newest(self) -> int | None:
        """Return the newest step that any node has and that was not refused."""
        newest = torch.tensor([max(self._published().keys() - self._refused, default=-1)])
        dist.all_reduce(newest, dist.ReduceOp.MAX)
        return int(newest) if newest >= 0 else None

    def refuse(self, step: int) -> str:
        """Refuse a damaged checkpoint for this attempt; `forget_after` removes it."""
        self._refused.add(step)
        return ""

    def writer(self, owner: str) -> str:  # noqa: ARG002
        """Return the host and the process that write here: this node's first rank."""
        return f"{self.world.host}-{self._writer_pid}"

    def facts(self, save_id: str, held: int) -> dict[str, Any]:
        """Return the ids of the run and the save, so that parts of two saves are never mixed."""
        return {"run": self._run_id, "save": save_id, "held": held}

    def complete(self, step: int, held: Callable[[], int]) -> None:
        """Copy the checkpoint to each node without it, from one that has the same."""
        directories = self.directory, self.mirrored
        here = [number for directory in directories for number in _has(directory, step)]
        if len({save for save, *_ in self.world.gather(torch.tensor(here)).tolist()}) == 1:
            return
        rows = self.world.gather(torch.tensor([*here, held()])).tolist()
        loans = lending.loans(rows, self.publishers)
        for lender, is_mirrored, borrower in loans:
            self.lent[borrower] = lender
            source = layout.path_of(directories[is_mirrored], step)
            written = layout.unpublished(self.directory, step, layout.owner())
            with contextlib.suppress(OSError):  # then `mismatch` says what is missing
                if lender == borrower == self.world.rank:
                    shutil.copytree(source, written)
                elif self.world.rank == lender:
                    lending.exchange(source, borrower, None, None)
                elif self.world.rank == borrower:
                    lending.exchange(None, None, written, lender)
                if self.world.rank == borrower:
                    layout.publish(written, self.path_of(step))
        if loans:
            self.world.barrier()  # the other ranks of a borrower's node read it, too

    def mismatch(self, step: int) -> str:
        """Return the problem if the nodes' parts belong to different saves; otherwise empty."""
        save, problem = "", ""
        try:
            save = str(manifest.load(self.path_of(step), whole=False).facts.get("save"))
        except (Damaged, ConfigError) as error:
            problem = f"{self.host_note}{error}"
        if save != self.world.broadcast_text(save) and not problem:
            problem = f"{self.host_note}it belongs to another save than rank 0's"
        return self.world.first_problem(problem)

    def check_fresh_start(self) -> None:
        """Do nothing: local disks may be lost, so shared storage decides."""

    def forget_after(self, step: int) -> None:
        """Remove checkpoints newer than the state that the run resumes from."""
        self._refused.clear()
        if self.publishes:
            for directory in (self.directory, self.mirrored):
                for newer, path in layout.published(directory).items():
                    if newer > step:
                        layout.retire(path)

    def remove(self) -> None:
        """Remove everything the run has on this node's disk."""
        if self.publishes:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class Copy:
    """A node-local checkpoint to copy to shared storage."""

    step: int
    facts: dict[str, Any]
    share: frozenset[int]  # ids of the chunks and values that this rank copies
    required: bool  # copied even if a newer one is waiting


class LocalTier:
    """Node-local checkpoints and their copies on shared storage; all ranks call it together."""

    def __init__(
        self, engine: Engine, store: NodeLocalStore, shared: Engine, mirrors: bool = False
    ) -> None:
        self.engine, self.store, self._shared = engine, store, shared
        self.waiting: list[Copy] = []
        self._copying: list[Copy] = []
        self._mirror: lending.Mirror | None = None
        if mirrors and len(store.publishers) > 1:
            directories = store.directory, store.mirrored
            self._mirror = lending.Mirror(*directories, store.publishers, store.world.rank)
        store.held = self._held

    def _held(self) -> set[int]:
        steps = {copy.step for copy in (*self.waiting, *self._copying)}
        return steps | (self._mirror.pending if self._mirror else set())

    def queue(self, result: SaveResult, required: bool) -> None:
        """Queue the save that has just ended; it replaces waiting ones that are not required."""
        copy = Copy(result.step, result.facts, self.engine.plan.copied, required)
        self.waiting = [*(older for older in self.waiting if older.required), copy]
        self.copy_next()
        if self._mirror:
            self._mirror.add(result.step)

    def finish(self, seconds: float) -> None:
        """Wait until the nodes have each other's checkpoints; none is mirrored afterwards."""
        if self._mirror:
            self._mirror.finish(seconds)

    def copy_next(self) -> None:
        """Start the next copy, unless a save to shared storage is in flight."""
        if self._shared.busy:
            return
        self._copying, self.waiting = self.waiting[:1], self.waiting[1:]
        for copy in self._copying:
            source, note = self.store.path_of(copy.step), self.store.host_note
            part = partial(_copy, source, note, self.store.world.rank, copy.share)
            self._shared.start(copy.step, part, copy.facts)


def _has(directory: Path, step: int) -> tuple[int, int]:
    """Return the numbers of the save and of the tensors of a step's checkpoint; 0 if none."""
    with contextlib.suppress(Damaged, ConfigError):
        facts = manifest.read(layout.path_of(directory, step), whole=False).facts
        return int(facts.get("save", "0"), 16), facts.get("held", 0)
    return 0, 0


def _copy(source: Path, host_note: str, rank: int, share: frozenset[int], written: Path) -> None:
    try:
        stored = manifest.load(source, whole=False)
        with read.DataFiles(source) as files:
            chunks: list[write.ChunkSource] = []
            for tensor in stored.tensors.values():
                form = tensor.key, tensor.dtype, tensor.shape
                for piece in tensor.pieces:
                    if identify(tensor.key, piece.offset) in share:
                        chunk = Chunk(*form, piece.offset, piece.shape)
                        chunks.append((chunk, partial(files.view, tensor, piece)))
            values = [(key, v) for key, v in stored.values.values() if identify(key) in share]
            write.write_part(written, rank, chunks, values)
    except Damaged as error:
        raise Damaged(f"{source} {host_note}{error}") from None


def directory_of(text: str, run_dir: RunDir) -> Path:
    """Return the directory of a run's checkpoints on this node; ConfigError if it is unusable."""
    root = os.path.expandvars(text)
    if "$" in root or not root.startswith("/"):
        expected = "expected an absolute path on a disk of the node, with every variable set"
        raise ConfigError(f"checkpoint.local={text} is {root} here: {expected}")
    digest = hashlib.blake2b(os.fsencode(run_dir.path), digest_size=4).hexdigest()
    return Path(root) / f"{run_dir.name}-{digest}"


def open_store(text: str, run_dir: RunDir, world: World) -> NodeLocalStore:
    """Open all nodes' directories together; ConfigError if one is unfit, OSError if unwritable."""
    unfit = failure = run_id = ""
    word = world.broadcast_text(os.urandom(4).hex())  # a killed attempt may have left other probes
    with contextlib.ExitStack() as stack:
        try:
            directory = directory_of(text, run_dir)
            _make(directory)
            # The probe shows whether the disk is writable, and which ranks share it.
            probe = directory / f".probe-{word}-{world.rank}"
            stack.callback(probe.unlink, missing_ok=True)
            probe.touch()
            run_id = _run_id(run_dir) if world.is_main else ""
        except ConfigError as error:
            unfit = f"{error} (rank {world.rank} on {world.host})"
        except OSError as error:
            failure = f"{error.filename or directory} on {world.host}: {error.strerror}"
        world.raise_together(unfit)
        if failure := world.first_problem(failure):
            raise OSError(failure)
        status = directory.stat()  # equal only for ranks that share the directory
        node = identify((world.host, status.st_dev, status.st_ino))
        nodes, pids = world.gather(torch.tensor([node, os.getpid()])).T.tolist()
        is_shared = nodes[world.rank] != nodes[0] and (directory / f".probe-{word}-0").exists()
        problem = (
            f"checkpoint.local={text} is one directory for several hosts: expected a directory "
            "on each node's own disk"
        )
        world.raise_together(problem if is_shared else "")
    run_id = world.broadcast_text(run_id)
    store = NodeLocalStore(directory, world, run_id, nodes, pids[nodes.index(nodes[world.rank])])
    if store.publishes:
        for part in (directory, store.mirrored):
            _remove_other_runs(part, run_id)
        for stray in directory.glob(".probe-*"):
            stray.unlink(missing_ok=True)
    return store


def _make(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others:
        raise ConfigError(
            f"{directory} is a link, belongs to another user, or is writable by others: expected "
            "your own directory; remove it, or choose another checkpoint.local"
        )


def _run_id(run_dir: RunDir) -> str:
    """Return the word by which nodes recognize this run's files; it is drawn at the first use."""
    path = run_dir.path / "local"
    if not path.exists():
        write_atomic(path, os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def _remove_other_runs(directory: Path, run_id: str) -> None:
    """Remove the checkpoints of an earlier run of this name whose run directory was deleted."""
    for path in layout.published(directory).values():
        with contextlib.suppress(Damaged, ConfigError):
            if manifest.load(path, whole=False).facts.get("run") != run_id:
                layout.retire(path)
