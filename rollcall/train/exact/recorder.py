"""Record fingerprints of every tensor in every step, so that two runs can be compared."""

import json
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rollcall.system.files import append_line, read_lines, write_atomic
from rollcall.train.data.source import Batch
from rollcall.train.exact import fingerprint
from rollcall.train.exact.difference import FINGERPRINTS
from rollcall.train.ranks.run import Run


class Recorder:
    """Writes fingerprints.jsonl; all ranks must make each call together."""

    def __init__(self, run: Run) -> None:
        self._world, self._progress = run.world, run.progress
        self._path = run.run_dir.path / FINGERPRINTS
        self._has_begun = False

    def begin(self) -> None:
        """Record every step from now on, and remove the lines of steps that will be repeated."""
        self._has_begun = True
        if self._world.is_main:
            lines = read_lines(self._path)
            kept = [line for line in lines if line.get("step", 0) <= self._progress.step]
            write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def step(
        self, model: nn.Module, shards: Sequence[Batch], losses: Sequence[torch.Tensor]
    ) -> None:
        """Record a step before its update; of a repeated step, the last line counts."""
        if not self._has_begun:
            return
        mine = [[_digest(shard), float(loss)] for shard, loss in zip(shards, losses, strict=True)]
        world = self._world
        everything = world.gather(torch.tensor(mine, dtype=torch.float64)).flatten(0, 1).tolist()
        if world.is_main:
            pairs = [(name, weight.grad) for name, weight in model.named_parameters()]
            gradients = {name: gradient for name, gradient in pairs if gradient is not None}
            line = {
                "step": self._progress.step + 1,
                "weights": _short(model.state_dict()),
                "samples": {str(n): int(digest) for n, (digest, _) in enumerate(everything)},
                "losses": {str(n): loss for n, (_, loss) in enumerate(everything)},
                "gradients": _short(gradients),
            }
            append_line(self._path, line)

    def end(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Record the last weights; return their hash, or raise RuntimeError if ranks differ."""
        world, mine = self._world, fingerprint.of(weights)
        if self._has_begun and world.is_main:
            append_line(self._path, {"step": self._progress.step + 1, "weights": _short(weights)})
        is_equal = mine == world.broadcast_text(mine)
        if problem := world.first_problem("" if is_equal else f"rank {world.rank}"):
            raise RuntimeError(
                f"{problem} ended with different weights than rank 0, although exact mode computes "
                "the same on all ranks: check its memory and its device for faults"
            )
        return mine


def _digest(batch: Batch) -> int:
    digest = 0
    for tensor in batch.tensors:
        digest = zlib.crc32(fingerprint.numbers(tensor), digest)
    return digest


def _short(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: fingerprint.short(tensor) for name, tensor in tensors.items()}
