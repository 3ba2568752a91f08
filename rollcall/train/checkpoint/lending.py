"""Copies of node-local checkpoints from node to node, where two nodes hold the same.

Replicas do, as under ddp and hsdp: the host that takes the place of a lost one gets its part from a
node whose disk, or memory, still has it, and shared storage is not read.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

BLOCK = 2**24
"""Bytes that are sent at once."""


def pairs(rows: list[tuple[int, int, int]], publishers: list[int]) -> list[tuple[int, int]]:
    """Return which publishing rank gives its checkpoint to which other one.

    Args:
        rows: for each rank the save that its node has, what that holds, and what the node has to
            hold; 0 for a save that is not there.
        publishers: the first rank of each node.
    """
    save = next((rows[rank][0] for rank in publishers if rows[rank][0]), 0)
    lenders = {rows[rank][1]: rank for rank in reversed(publishers) if rows[rank][0] == save}
    borrowers = [rank for rank in publishers if rows[rank][0] != save and rows[rank][2] in lenders]
    return [(lenders[rows[rank][2]], rank) for rank in borrowers] if save else []


def lend(path: Path, rank: int) -> None:
    """Send a checkpoint's files to another rank; what cannot be read is sent as zeros."""
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    names = bytearray(json.dumps(sizes).encode())
    dist.send(torch.tensor([len(names)]), rank)
    dist.send(torch.frombuffer(names, dtype=torch.uint8), rank)
    for name, size in sizes.items():
        with (path / name).open("rb") as file:
            for start in range(0, size, BLOCK):
                block = bytearray(min(BLOCK, size - start))
                with suppress(OSError):
                    file.readinto(block)
                dist.send(torch.frombuffer(block, dtype=torch.uint8), rank)


def borrow(path: Path, rank: int) -> OSError | None:
    """Write the files that another rank sends into a new directory; return why that failed."""
    problem = None
    count = torch.zeros(1, dtype=torch.int64)
    dist.recv(count, rank)
    names = torch.empty(int(count), dtype=torch.uint8)
    dist.recv(names, rank)
    path.mkdir(mode=0o700)
    for name, size in json.loads(names.numpy().tobytes()).items():
        for start in range(0, size, BLOCK):
            block = torch.empty(min(BLOCK, size - start), dtype=torch.uint8)
            dist.recv(block, rank)
            try:
                with (path / name).open("ab") as file:
                    file.write(block.numpy())
            except OSError as error:  # the other rank goes on sending
                problem = error
    return problem
