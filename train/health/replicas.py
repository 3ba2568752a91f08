"""Check that ranks which hold the same weights or buffers agree.

Each exchange compares a fingerprint of another piece of them, over all ranks that should hold it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from rollcall.train.dist.agreement import Action, FaultError, one_slot
from rollcall.train.dist.run import Run
from rollcall.train.parallel.strategy import Strategy

PIECE = 1 << 20
"""The most numbers of a piece: few enough that reading them costs little beside a step."""
PRIME = 1048573
"""Fingerprints are smaller, so that fp32 holds them exactly; any flipped bit changes them."""
ALIKE = ("replicate", "shard", "tensor")
"""Dimensions over which weights can be the same; a fingerprint carries a bit for each."""
BIT = 1 << 20
"""The first of these bits, above every fingerprint; all are below 2^24, exact in fp32."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The member of the step that compares ranks which should hold the same weights."""

    def __init__(self, run: Run, strategy: Strategy) -> None:
        self._run, self._strategy = run, strategy
        self._turn = 0  # fingerprints taken
        self._tensor = ""
        self._compared: list[tuple[str, int]] | None = None
        # Ranks that hold the same, by the bits: (groups, ranks of one).
        self._groups: dict[int, NDArray[np.int64]] = {}
        self._is_on = run.config.faults.divergence != "off" and run.world.world_size > 1
        self._has_differed = False

    def report(self) -> Mapping[str, torch.Tensor]:
        """Return the fingerprint of the piece whose turn it is."""
        world = self._run.world
        value = self._fingerprint() if self._is_on else torch.zeros((), device=world.device)
        return {"fingerprints": one_slot(value, world.rank, world.world_size)}

    def _fingerprint(self) -> torch.Tensor:
        # With bits for where the piece is the same: other pipeline stages may compare weights that
        # are the same on other ranks.
        if self._compared is None:
            self._compared = self._find_compared()
        if not self._compared:
            return torch.zeros((), device=self._run.world.device)
        turn, number = divmod(self._turn, len(self._compared))
        self._turn += 1
        self._tensor, bits = self._compared[number]
        owner, _, leaf = self._tensor.rpartition(".")
        tensor = getattr(self._strategy.model.get_submodule(owner), leaf)
        return fingerprint(piece(tensor, turn)) + bits

    def _find_compared(self) -> list[tuple[str, int]]:
        """Return the names of the tensors that several ranks hold, and the bits of where."""
        model = self._strategy.model
        found = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            alike = self._strategy.alike(tensor, is_buffer=not isinstance(tensor, nn.Parameter))
            bits = sum(BIT << place for place, other in enumerate(ALIKE) if other in alike)
            if bits:
                found.append((name, bits))
        return found

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Report the first difference of replicas; FaultError with `faults.divergence=stop`."""
        if not self._has_differed and not agreed["skipped"]:
            odd = self._odd(agreed["fingerprints"])
            if odd:
                self._has_differed = True
                self._report(step, odd)
        return Action.CONTINUE

    def _odd(self, fingerprints: list[float]) -> list[int]:
        """Return the ranks that differ from the majority of their replicas."""
        if fingerprints.count(fingerprints[0]) == len(fingerprints):
            return []
        odd: list[int] = []
        found = np.array(fingerprints)
        bits = found.astype(np.int64) // BIT
        for kind in map(int, np.unique(bits)):
            alike = [name for place, name in enumerate(ALIKE) if kind >> place & 1]
            if kind not in self._groups:
                self._groups[kind] = np.array(self._strategy.replicas(alike), dtype=np.int64)
            groups = self._groups[kind]
            if not len(groups):
                continue
            groups = groups[bits[groups[:, 0]] == kind]  # others belong to stages that differ
            numbers = found[groups]
            for group in groups[(numbers != numbers[:, :1]).any(1)].tolist():
                [(usual, often)] = Counter(found[group].tolist()).most_common(1)
                tie = 2 * often <= len(group)  # of two, either may be wrong
                odd += [rank for rank in group if tie or fingerprints[rank] != usual]
        return sorted(odd)

    def _report(self, step: int, odd: list[int]) -> None:
        world = self._run.world
        tensor = world.broadcast_text(self._tensor, odd[0])  # stages have different ones
        ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} of {world.world_size}"
        text = (
            f"the weights of {ranks} differ from the other replicas', seen in {tensor} after step "
            f"{step}; look for a faulty device or different CPUs, and go back to a checkpoint"
        )
        self._run.tell("diverged", text, step=step, ranks=odd, tensor=tensor)
        if self._run.config.faults.divergence == "stop":
            raise FaultError(text)


def piece(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the piece whose turn it is of what this rank holds of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    numbers = local.detach().flatten()
    start = turn % max(1, math.ceil(len(numbers) / PIECE)) * PIECE
    return numbers[start : start + PIECE]


def fingerprint(numbers: torch.Tensor) -> torch.Tensor:
    """Return a whole number below 2^20 that depends on every bit, as fp32 on the same device."""
    bits = numbers.contiguous().view(INTEGERS[numbers.element_size()])
    # Integer sums do not depend on the order of addition.
    return bits.sum(dtype=torch.int64).remainder(PRIME).float()
