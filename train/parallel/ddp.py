"""Every rank holds a replica and computes a share of the batch; gradients are averaged.

DistributedDataParallel, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.data.source import Batch
from train.parallel.single import Single


class Ddp(Single):
    """Replicas kept equal by averaging their gradients in every step."""

    model: DistributedDataParallel

    def _check(self) -> None:
        pass

    def rows(self, batch: int) -> range:
        """An equal share for every rank; the last ranks' may reach into padding."""
        share = math.ceil(batch / self.world.world_size)
        return range(self.world.rank * share, (self.world.rank + 1) * share)

    def place(self, model: nn.Module, example: Batch) -> None:
        """Wrap the model, and let DDP settle the layout of its buckets."""
        device = self.world.device
        model = model.to(device)
        self.model = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
        self._settle_buckets(example)

    def _settle_buckets(self, example: Batch) -> None:
        # DDP lays out its buckets anew after its first backward, in the order of the gradients. The
        # layout decides in which order a ring adds the ranks' numbers: without this the first step
        # after a resume would differ in the last bit from an uninterrupted run's.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        for _ in range(2):
            self.forward_backward([example], len(example.weights))
            self.model.zero_grad()
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _communicate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()

    def _averaged_over(self) -> int:
        return self.world.world_size
