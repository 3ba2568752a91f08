"""How does a node-local checkpoint reach shared storage? Each rank copies a share of what it wrote.

Together the shares make up the whole state once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.train.checkpoint import manifest, read, write
from rollcall.train.checkpoint.contents import Damaged, Manifest, Piece, StoredTensor
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.node_local import NodeLocalStore
from rollcall.train.checkpoint.pending_save import SaveResult
from rollcall.train.checkpoint.write_plan import identify


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
        self.engine = engine
        self.store = store
        self._shared = shared
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
        self.store.hold(copy.step for copy in (*self._waiting, *self._copying))


def _copy(source: Path, host_note: str, rank: int, share: frozenset[int], written: Path) -> None:
    try:
        stored = manifest.load(source, whole=False)
        with read.DataFiles(source) as files:
            chunks = list(_chunks(stored, files, share))
            values = [each for each in stored.values.values() if identify(each[0]) in share]
            write.write_part(written, rank, chunks, values)
    except Damaged as error:
        raise Damaged(f"{source} {host_note}{error}") from None


def _chunks(
    stored: Manifest, files: read.DataFiles, share: frozenset[int]
) -> Iterator[write.ChunkSource]:
    for tensor in stored.tensors.values():
        key, dtype, shape = tensor.key, tensor.dtype, tensor.shape
        for piece in tensor.pieces:
            if identify(key, piece.offset) in share:
                chunk = write.Chunk(key, dtype, shape, piece.offset, piece.shape)
                yield chunk, partial(_bytes, files, tensor, piece)


def _bytes(files: read.DataFiles, tensor: StoredTensor, piece: Piece) -> memoryview:
    return read.view(files.piece(tensor, piece))
