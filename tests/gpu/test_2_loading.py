"""Batches are copied to the GPU ahead of their use."""

from __future__ import annotations

import pytest
import torch
from user_datasets import SIZE, Noisy

from rollcall.config.schema import Data
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.source import Source


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_the_gpu_and_the_host_are_equal(workers: int) -> None:
    """Copies on another stream are complete before they are used. 10 s."""
    source = Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)
    order = Order(SIZE, 10 * SIZE, 16, seed=1)
    busy = torch.rand(4000, 4000, device="cuda")
    copies = []
    for device in ("cpu", "cuda"):
        loading = Loading(Data(num_workers=workers), seed=7, device=torch.device(device))
        batches = []
        for batch in training_batches(source, order, range(16), range(order.steps), loading):
            busy = busy @ busy  # keeps the compute stream behind the copy stream
            batches.append(batch.inputs * 1)
            assert batch.inputs.device.type == device
        copies.append(torch.cat(batches).cpu())
    assert torch.equal(*copies)
