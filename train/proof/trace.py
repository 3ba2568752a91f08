"""What did each step compute? Fingerprints of every tensor, so that two runs can be compared.

Rank 0 writes fingerprints.jsonl: a line of facts for each attempt, one for each step, and the
weights at the end.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from train.data.source import Batch
from train.faults import crosscheck
from train.loop import Trainer
from train.parallel.exact import Exact
from train.proof import fingerprint
from train.proof.difference import FINGERPRINTS
from train.run import append_line, read_lines, write_atomic


def start(trainer: Trainer) -> None:
    """Write down every step that the trainer of an exact run does from here on."""
    assert isinstance(trainer.strategy, Exact)
    trainer.strategy.recorder = Recorder(trainer)


def conclude(trainer: Trainer) -> str:
    """The hash of the weights of an exact run; every rank calls it together.

    Raises:
        RuntimeError: the ranks hold different weights; names the first that differs.
    """
    assert isinstance(trainer.strategy, Exact)
    world = trainer.world
    weights = trainer.update.state()["model"]
    if trainer.strategy.recorder:
        trainer.strategy.recorder.end(weights)
    mine = fingerprint.of(weights)
    main = world.broadcast_text(mine)
    first = torch.tensor([world.world_size if mine == main else world.rank])
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < world.world_size:
        raise RuntimeError(
            f"rank {int(first)} ended with other weights than rank 0, though exact mode computes "
            "the same on all: suspect its memory or its device"
        )
    return mine


class Recorder:
    """Writes what the steps of an exact run computed; every rank makes each call together."""

    def __init__(self, trainer: Trainer) -> None:
        """Begin where the trainer is; lines of steps that are done again are dropped."""
        self._path = trainer.run_dir.path / FINGERPRINTS
        self._trainer = trainer
        if trainer.world.is_main:
            lines = read_lines(self._path)
            kept = [line for line in lines if line.get("step", 0) <= trainer.step]
            kept.append({"facts": crosscheck.facts(trainer.world.device)})
            write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def step(
        self, model: nn.Module, shards: Sequence[Batch], losses: Sequence[torch.Tensor]
    ) -> None:
        """Write the step whose gradients are complete and whose update is still to come.

        One that is done again has a second line, which counts.
        """
        mine = [[_digest(shard), float(loss)] for shard, loss in zip(shards, losses, strict=True)]
        world = self._trainer.world
        found = [torch.zeros(len(mine), 2, dtype=torch.float64) for _ in range(world.world_size)]
        dist.all_gather(found, torch.tensor(mine, dtype=torch.float64))
        everything = torch.cat(found).tolist()
        if world.is_main:
            append_line(
                self._path,
                {
                    "step": self._trainer.step + 1,
                    "weights": _short(model.state_dict()),
                    "samples": {str(n): int(digest) for n, (digest, _) in enumerate(everything)},
                    "losses": {str(n): loss for n, (_, loss) in enumerate(everything)},
                    "gradients": _short(
                        {
                            name: weight.grad
                            for name, weight in model.named_parameters()
                            if weight.grad is not None
                        }
                    ),
                },
            )

    def end(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the weights after the last step of this attempt."""
        if self._trainer.world.is_main:
            append_line(self._path, {"step": self._trainer.step + 1, "weights": _short(weights)})


def _digest(batch: Batch) -> int:
    digest = 0
    for tensor in batch:
        digest = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), digest)
    return digest


def _short(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: fingerprint.short(tensor) for name, tensor in tensors.items()}
