"""Copies of node-local checkpoints from node to node.

The host that takes the place of a lost one gets its part from a node that has the same on its disk,
or in its memory: a replica, as under ddp and hsdp, or the next node, to which `checkpoint.mirror`
copies what no replica may hold. Shared storage is not read. As in Gemini (Wang et al., SOSP 2023),
https://doi.org/10.1145/3600006.3613145.
"""

import contextlib
import itertools
import json
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rollcall.train.checkpoint import layout

BLOCK = 2**24
"""Bytes that are sent at once."""


class Loan(NamedTuple):
    """A node's checkpoint that another node gets, by the nodes' first ranks."""

    lender: int
    is_mirrored: bool  # it is the copy that the lender keeps for another node
    borrower: int


def loans(rows: Sequence[Sequence[int]], publishers: Sequence[int]) -> list[Loan]:
    """Return which nodes get a step's checkpoint from which others.

    A row of a rank is what its node has: the save (0 if none) and a number for its tensors, the
    same for the copy that it keeps for another node, and the number that it needs.
    """
    save = next((row[kind] for kind in (0, 2) for row in rows if row[kind]), 0)
    held = {
        rows[rank][kind + 1]: (rank, kind == 2)
        for kind, rank in itertools.product((2, 0), reversed(publishers))
        if rows[rank][kind] == save
    }
    borrowers = [rank for rank in publishers if rows[rank][0] != save and rows[rank][4] in held]
    return [Loan(*held[rows[rank][4]], rank) for rank in borrowers]


def exchange(
    source: Path | None, to: int | None, target: Path | None, of: int | None, group: Any = None
) -> bool:
    """Send a checkpoint's files to one rank, and write files of another one; return True if any.

    What cannot be read is sent as zeros, which no reader takes for the checkpoint. Raise OSError if
    what came could not be written, though all of it has come.
    """
    files = sorted(source.iterdir()) if source and source.is_dir() else []
    header = bytearray(json.dumps({file.name: file.stat().st_size for file in files}).encode())
    count = _swap(bytearray(len(header).to_bytes(8, "big")), to, 8, of, group)
    names = _swap(header, to, int.from_bytes(count, "big"), of, group)
    mine, theirs = json.loads(header), json.loads(names or "{}")
    problem: OSError | None = None
    for sent, received in itertools.zip_longest(_blocks(mine), _blocks(theirs)):
        data = bytearray(sent[2] if sent else 0)
        if source and sent:
            with contextlib.suppress(OSError), (source / sent[0]).open("rb") as file:
                file.seek(sent[1])
                file.readinto(data)
        block = _swap(data, to, received[2] if received else 0, of, group)
        if target and received:
            try:
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                with (target / received[0]).open("ab") as written:
                    written.write(block)
            except OSError as error:
                problem = error
    if problem:
        raise problem
    return bool(theirs)


def _blocks(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for name, size in sizes.items():
        for start in range(0, size, BLOCK):
            yield name, start, min(BLOCK, size - start)


def _swap(sent: bytearray, to: int | None, size: int, of: int | None, group: Any) -> bytes:
    work = None
    if to is not None and sent:
        work = dist.isend(torch.frombuffer(sent, dtype=torch.uint8), to, group)
    block = torch.empty(size if of is not None else 0, dtype=torch.uint8)
    if of is not None and size:
        dist.recv(block, of, group)
    if work:
        work.wait()
    return block.numpy().tobytes()


class Mirror:
    """Copies checkpoints to the next node in a thread, in the same order on all nodes."""

    def __init__(self, source: Path, target: Path, publishers: Sequence[int], rank: int) -> None:
        """Join the first ranks of all nodes; every rank calls it, with its node's directories."""
        self.pending: set[int] = set()
        self._source, self._target = source, target
        self._group = dist.new_group(list(publishers), backend="gloo")
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")
        if rank in publishers:
            layout.clean(target)
            at = publishers.index(rank)
            self._to, self._of = publishers[(at + 1) % len(publishers)], publishers[at - 1]
            self._thread.start()

    def add(self, step: int) -> None:
        """Copy a step's checkpoint after those before it; all nodes call it alike."""
        if self._thread.is_alive():
            self.pending.add(step)
            self._steps.put(step)

    def finish(self, seconds: float) -> None:
        """Wait until all is copied; there is nothing to copy afterwards."""
        self._steps.put(0)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        with contextlib.suppress(RuntimeError):  # a node has ended, and all start again
            while step := self._steps.get():
                try:
                    self._copy(step)
                except OSError as error:
                    text = f"rollcall: warning: checkpoint.mirror: step {step}: {error}"
                    print(text, file=sys.stderr, flush=True)
                self.pending.discard(step)
        self.pending.clear()

    def _copy(self, step: int) -> None:
        written = layout.unpublished(self._target, step, layout.owner())
        source = layout.path_of(self._source, step)
        with layout.reading(source):
            if exchange(source, self._to, written, self._of, self._group):
                layout.publish(written, layout.path_of(self._target, step))
        published = layout.published(self._target)
        for older in layout.stale([*published], 1, None, None):
            layout.retire(published[older])
