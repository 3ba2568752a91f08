"""Batches that are copied to a GPU ahead of their use."""

from __future__ import annotations

import pytest
import torch
from sources import SIZE, Noisy

from train.data.loading import Loading
from train.data.order import Order, training_batches
from train.data.source import Source
from train.schema import Data

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch sees no GPU; on a machine with one: ./env/run pytest tests/gpu",
)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_the_gpu_equal_those_of_the_host(workers: int) -> None:
    source = Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)
    order = Order(SIZE, 10 * SIZE, 16, seed=1)
    busy = torch.rand(4000, 4000, device="cuda")
    copies = []
    for device in ("cpu", "cuda"):
        loading = Loading(Data(workers=workers), seed=7, device=torch.device(device))
        batches = []
        for batch in training_batches(source, order, range(16), range(order.steps), loading):
            busy = busy @ busy  # the stream of the computation is behind that of the copies
            batches.append(batch.inputs * 1)
            assert batch.inputs.device.type == device
        copies.append(torch.cat(batches).cpu())
    assert torch.equal(*copies)
