"""Check that ranks which hold the same weights or buffers agree.

Each exchange compares the fingerprint of the next piece on all ranks that should hold it; `Units`
compares which weights were gathered.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rollcall.config import ConfigError
from rollcall.messages.text import listed
from rollcall.train.parallel.shard import Shard
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.agreement import Action, FaultError, Number, Step, one_slot
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.run import Run

PIECE_SIZE = 1 << 20
"""The numbers of a piece: few enough that reading them costs little beside a step."""
MODULUS = 1048573
"""A prime above every fingerprint, so that fp32 holds them and any flipped bit changes them."""
ALIKE = ("replicate", "shard", "tensor")
"""Mesh dimensions whose ranks may hold the same weights; a fingerprint carries a bit for each."""
FIRST_BIT = 1 << 20
"""The first of these bits, above every fingerprint; all are below 2^24, exact in fp32."""
INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprints:
    """A fingerprint of the same piece on each rank."""

    numbers: list[Number]


class Replicas:
    """The member of the step that compares ranks which should hold the same weights."""

    def __init__(self, run: Run, strategy: Strategy) -> None:
        self._run, self._strategy = run, strategy
        # Replicas that train alone skip steps alone, and all ranks must learn about it.
        self.wants_every_step = strategy.apart > 1
        self._turn = 0  # fingerprints taken
        self._tensor = ""
        self._compared: list[tuple[str, int]] | None = None
        # Ranks that hold the same tensors, by the bits: (groups, ranks of a group).
        self._groups: dict[int, NDArray[np.int64]] = {}
        self._is_on = run.config.faults.divergence != "off" and run.world.world_size > 1
        self._has_differed = False

    def report(self) -> Fingerprints:
        """Return the fingerprint of the piece whose turn it is."""
        world = self._run.world
        value = self._fingerprint() if self._is_on else torch.zeros((), device=world.device)
        return Fingerprints(one_slot(value, world.rank, world.world_size))

    def _fingerprint(self) -> torch.Tensor:
        # The bits tell which ranks hold the piece, because pipeline stages compare their own.
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
        """Return the names of the tensors that several ranks hold, and the bits of the ranks."""
        model = self._strategy.model
        compared = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            alike = self._strategy.alike(tensor, is_buffer=not isinstance(tensor, nn.Parameter))
            bits = sum(FIRST_BIT << bit for bit, axis in enumerate(ALIKE) if axis in alike)
            if bits:
                compared.append((name, bits))
        return compared

    def settle(self, step: Step, agreed: Fingerprints) -> Action:
        """Report the first difference of replicas; FaultError with `faults.divergence=stop`."""
        if not self._has_differed and not step.is_skipped:
            odd = self._odd([*map(float, agreed.numbers)])
            if odd:
                self._has_differed = True
                self._report(step.number, odd)
        return Action.CONTINUE

    def _odd(self, fingerprints: list[float]) -> list[int]:
        """Return the ranks that differ from the majority of their replicas."""
        if fingerprints.count(fingerprints[0]) == len(fingerprints):
            return []
        odd: list[int] = []
        values = np.array(fingerprints)
        bits = values.astype(np.int64) // FIRST_BIT
        for kind in map(int, np.unique(bits)):
            alike = [axis for bit, axis in enumerate(ALIKE) if kind >> bit & 1]
            if kind not in self._groups:
                self._groups[kind] = np.array(self._strategy.replicas(alike), dtype=np.int64)
            groups = self._groups[kind]
            if not len(groups):
                continue
            groups = groups[bits[groups[:, 0]] == kind]  # of the stages that sent these bits
            numbers = values[groups]
            for group in groups[(numbers != numbers[:, :1]).any(1)].tolist():
                [(majority, count)] = Counter(values[group].tolist()).most_common(1)
                is_tie = 2 * count <= len(group)  # any of them may be wrong
                odd += [rank for rank in group if is_tie or fingerprints[rank] != majority]
        return sorted(odd)

    def _report(self, step: int, odd: list[int]) -> None:
        world = self._run.world
        tensor = world.broadcast_text(self._tensor, odd[0])  # stages have different tensors
        ranks = "rank" if len(odd) == 1 else "ranks"
        text = (
            f"the weights of {ranks} {', '.join(map(str, odd))} of {world.world_size} differ "
            f"from the other replicas', seen in {tensor} after step {step}; look for a faulty "
            "device or different CPUs, and go back to a checkpoint"
        )
        self._run.tell("diverged", text, step=step, ranks=odd, tensor=tensor)
        if self._run.config.faults.divergence == "stop":
            raise FaultError(text)


def piece(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the piece of this rank's part of a tensor whose turn it is."""
    numbers = local_of(tensor).detach().flatten()
    start = turn % max(1, math.ceil(len(numbers) / PIECE_SIZE)) * PIECE_SIZE
    return numbers[start : start + PIECE_SIZE]


def fingerprint(numbers: torch.Tensor) -> torch.Tensor:
    """Return a whole number below 2^20 that depends on every bit, as fp32 on the same device."""
    bits = numbers.contiguous().view(INTEGER_TYPES[numbers.element_size()])
    # Integer sums do not depend on the order of addition.
    return bits.sum(dtype=torch.int64).remainder(MODULUS).float()


@dataclass(frozen=True)
class Traces:
    """Sums over the ranks: all traces are equal if their variance is zero."""

    total: float
    squares: float


class Units:
    """The member of the step that compares what the ranks have gathered since the start."""

    def __init__(self, run: Run, shard: Shard) -> None:
        self._run, self._shard = run, shard

    def report(self) -> Traces:
        """Return this rank's trace."""
        trace = self._shard.trace
        return Traces(trace, trace**2)

    def settle(self, step: Step, agreed: Traces) -> Action:
        """Go on if all ranks have gathered the same; otherwise raise ConfigError on all ranks."""
        world = self._run.world
        if agreed.squares * world.world_size == agreed.total**2:
            return Action.CONTINUE
        uses = self._shard.uses()
        of_ranks = world.gather(torch.tensor([*uses.values()]))
        differs = (of_ranks != of_ranks[0]).any(0).tolist()
        names = [name or "the model" for name, odd in zip(uses, differs, strict=True) if odd]
        what = listed(names) or "modules in another order"
        raise ConfigError(
            f"the ranks did not use the same weights before step {step.number + 1}, so the "
            f"weights of different modules are mixed up: some ranks alone used {what}; "
            f"{self._run.config.parallel.choice} gathers weights on all ranks together: set "
            "parallel.conditional to their names, such as experts.*, to keep them whole on each "
            "rank, or choose parallel.strategy=ddp or zero1, and start again"
        )
