"""How are checkpoints kept on the nodes' own disks? In the same format, a part on each node.

A checkpoint here holds only what the node's own ranks hold, and each node publishes its own. Then
each rank copies a share of it to shared storage; together the shares are the whole state once.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollcall.config import ConfigError
from rollcall.records.files import write_atomic
from rollcall.run_dir import RunDir
from rollcall.train.checkpoint import layout, manifest, read, write
from rollcall.train.checkpoint.contents import Damaged, Piece, StoredTensor
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.pending_save import SaveResult
from rollcall.train.checkpoint.store import Store
from rollcall.train.checkpoint.write_plan import identify
from rollcall.train.dist.world import World

KEEP = 2
"""Checkpoints kept: while the nodes publish a new one, the previous one is complete on all."""


class NodeLocalStore(Store):
    """A directory on each node's own disk; the first rank of each node publishes."""

    whole = False

    def __init__(
        self, directory: Path, world: World, run_id: str, nodes: Sequence[int], writer_pid: int
    ) -> None:
        """Take the process id of this node's first rank, and each rank's node as a number."""
        super().__init__(directory, world, KEEP, nodes=nodes)
        self.host_note = f"on {world.host}: "
        self._run_id = run_id  # distinguishes this run from an earlier one of the same name
        self._writer_pid = writer_pid
        self.held: frozenset[int] = frozenset()  # steps that are kept, however old they become

    def newest(self) -> int | None:
        """Return the newest step that any node has and that was not refused."""
        mine = max(layout.published(self.directory).keys() - self._refused, default=-1)
        newest = torch.tensor([mine])
        dist.all_reduce(newest, dist.ReduceOp.MAX)
        return int(newest) if newest >= 0 else None

    def stale(self, steps: Sequence[int]) -> list[int]:
        """Return which of these steps may be removed."""
        return [step for step in super().stale(steps) if step not in self.held]

    def refuse(self, step: int) -> str:
        """Do not offer this checkpoint again in this attempt; `forget_after` removes it."""
        self._refused.add(step)
        return ""

    def writer(self, owner: str) -> str:  # noqa: ARG002
        """Return who writes in this directory: this node's first rank."""
        return f"{self.world.host}-{self._writer_pid}"

    def facts(self, save_id: str) -> dict[str, Any]:
        """Return the run and the save, so that parts of different saves are never mixed."""
        return {"run": self._run_id, "save": save_id}

    def mismatch(self, step: int) -> str:
        """Say why the nodes' parts of a checkpoint do not belong together; empty if they do.

        An attempt that lost the run to another may have saved the same step slightly differently.
        """
        save, problem = "", ""
        try:
            save = str(manifest.load(self.place(step), whole=False).facts.get("save"))
        except (Damaged, ConfigError) as error:
            problem = f"{self.host_note}{error}"
        if save != self.world.broadcast_text(save) and not problem:
            problem = f"{self.host_note}it belongs to another save than rank 0's"
        return self.world.first_problem(problem)

    def check_fresh_start(self) -> None:
        """Allow it: shared storage decides, because local disks may be lost."""

    def forget_after(self, step: int) -> None:
        """Remove checkpoints newer than the state that the run resumes from."""
        self._refused.clear()
        if self.publishes:
            for newer, path in layout.published(self.directory).items():
                if newer > step:
                    layout.retire(path)

    def remove(self) -> None:
        """Remove everything the run has on this node's disk."""
        if self.publishes:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class Copy:
    """A node-local checkpoint that is to be copied."""

    step: int
    facts: dict[str, Any]
    share: frozenset[int]  # ids of the chunks and values that this rank copies
    required: bool  # even if a newer one is waiting


class LocalTier:
    """Node-local checkpoints and their copies on shared storage; all ranks call it together."""

    def __init__(self, engine: Engine, store: NodeLocalStore, shared: Engine) -> None:
        self.engine, self.store, self._shared = engine, store, shared
        self._waiting: list[Copy] = []
        self._copying: list[Copy] = []

    def queue(self, result: SaveResult, required: bool) -> None:
        """Queue the save that has just ended; it replaces waiting ones that are not required."""
        copy = Copy(result.step, result.facts, self.engine.plan.copied, required)
        self._waiting = [*(older for older in self._waiting if older.required), copy]
        self._hold()
        self.copy_next()

    def copy_next(self) -> None:
        """Start the next copy, unless a save to shared storage is in flight."""
        if self._shared.busy:
            return
        self._copying, self._waiting = self._waiting[:1], self._waiting[1:]
        self._hold()
        for copy in self._copying:
            source, note = self.store.place(copy.step), self.store.host_note
            part = partial(_copy, source, note, self.store.world.rank, copy.share)
            self._shared.begin_copy(copy.step, part, copy.facts)

    def stop_copying(self) -> None:
        """Start no further copy."""
        self._waiting = []
        self._hold()

    def _hold(self) -> None:
        self.store.held = frozenset(copy.step for copy in (*self._waiting, *self._copying))


def _copy(source: Path, host_note: str, rank: int, share: frozenset[int], written: Path) -> None:
    try:
        stored = manifest.load(source, whole=False)
        with read.DataFiles(source) as files:
            chunks: list[write.ChunkSource] = [
                (
                    write.Chunk(tensor.key, tensor.dtype, tensor.shape, piece.offset, piece.shape),
                    partial(_bytes, files, tensor, piece),
                )
                for tensor in stored.tensors.values()
                for piece in tensor.pieces
                if identify(tensor.key, piece.offset) in share
            ]
            values = [each for each in stored.values.values() if identify(each[0]) in share]
            write.write_part(written, rank, chunks, values)
    except Damaged as error:
        raise Damaged(f"{source} {host_note}{error}") from None


def _bytes(files: read.DataFiles, tensor: StoredTensor, piece: Piece) -> memoryview:
    return read.view(files.piece(tensor, piece))


def place(text: str, run_dir: RunDir) -> Path:
    """Return the directory of a run's checkpoints on this node; ConfigError if it is unusable."""
    root = os.path.expandvars(text)
    if "$" in root or not root.startswith("/"):
        raise ConfigError(
            f"checkpoint.local={text} is {root} here: expected an absolute path on a disk of the "
            "node, with every variable set"
        )
    digest = hashlib.blake2b(os.fsencode(run_dir.path), digest_size=4).hexdigest()
    return Path(root) / f"{run_dir.name}-{digest}"


def open_store(text: str, run_dir: RunDir, world: World) -> NodeLocalStore:
    """Make the directories of `checkpoint.local` on all nodes, and find out which ranks share one.

    Raises:
        ConfigError: a directory is not usable as configured, or not safe.
        OSError: a local disk is not writable.
    """
    unfit = failure = run_id = ""
    word = world.broadcast_text(os.urandom(4).hex())  # a killed attempt may have left other probes
    with contextlib.ExitStack() as stack:
        try:
            directory = place(text, run_dir)
            _make(directory)
            # It shows that the disk is writable, and who shares it.
            probe = directory / f".probe-{word}-{world.rank}"
            stack.callback(probe.unlink, missing_ok=True)
            probe.touch()
            run_id = _run_id(run_dir) if world.is_main else ""
        except ConfigError as error:
            unfit = f"{error} (rank {world.rank} on {world.host})"
        except OSError as error:
            failure = f"{error.filename or directory} on {world.host}: {error.strerror}"
        world.raise_together(unfit)
        failure = world.first_problem(failure)
        if failure:
            raise OSError(failure)
        status = directory.stat()  # equal only for ranks that share the directory
        node = identify((world.host, status.st_dev, status.st_ino))
        nodes, pids = world.gather(torch.tensor([node, os.getpid()])).T.tolist()
        shared = nodes[world.rank] != nodes[0] and (directory / f".probe-{word}-0").exists()
        world.raise_together(
            f"checkpoint.local={text} is one directory for several hosts: expected a directory on "
            "each node's own disk"
            if shared
            else ""
        )
    run_id = world.broadcast_text(run_id)
    writer_pid = pids[nodes.index(nodes[world.rank])]
    store = NodeLocalStore(directory, world, run_id, nodes, writer_pid)
    if store.publishes:
        _remove_other_runs(directory, run_id)
        for left in directory.glob(".probe-*"):
            left.unlink(missing_ok=True)
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
    """Return the word by which nodes recognize this run's files; made at its first use."""
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
